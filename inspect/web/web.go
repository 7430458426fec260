// Package web is a page that shows locks while they are held and waited for: who
// has them, who queues, how long, and what went wrong. An application mounts it
// beside its pprof; "mysqllock ui" serves it, too.
//
//	page := web.New(inspector, web.Options{})
//	defer page.Close()
//	http.Handle("/debug/locks/", page)
//
// It works under any path, with or without http.StripPrefix, and asks no other host
// for anything.
//
// # Who may look
//
// Clients on the same machine, unless [Options.AllowRemote] says otherwise: keys,
// accounts and the names of hosts are not for everybody. That is every account of
// the machine, and everybody with a port forwarded to it; with [Options.AllowRelease]
// they can break locks. Where not all of them may, mount the page behind
// authentication, or under a path that has a secret in it. Which machine asks is
// known by the connection, and by a header Forwarded or X-Forwarded-For; a proxy on
// this machine that sets neither makes all who reach it local, so authenticate
// there. The Host header has to be localhost, an IP address, or one of
// [Options.Hosts], so that no other site can have a browser read the page under
// a name of its own.
//
// # What it costs
//
// While nobody looks, nothing, or with [Options.Background] a look every ten seconds,
// or more often if there are leases shorter than half a minute. While somebody does,
// one [inspect.Inspector.Snapshot]
// a second, on a connection of its own, however many look: about ten statements,
// which with 150 locks held took 14 ms on MySQL 9.7 and 5 ms on MariaDB 10.11 (the
// median, on a busy machine). There are fewer where that takes longer than a tenth
// of a second, so that the server is busy with them for a tenth of the time at most.
// With 1,000 locks held and 5,000 waiters in the server a look took 2.8 s on MySQL 9.7, 1.9 s
// on MariaDB 10.11 and 0.7 s on 11.8, so there is one in 28, 19 and 7 seconds; MariaDB then
// lists more than is read, and the page says that there may be more (make look).
// A page in a tab that is not shown does not look.
//
// # What it shows
//
// What a Snapshot does, with what that cannot tell. Beyond that:
//
// How old that is. The page is called live if it is at most three seconds old. Else it says
// of when it is, how old that is, and when the next look is; or since when the server has not answered. A
// view that is a minute old, or whose next look is overdue, is dimmed.
// Opened again, the page shows the last view at once.
//
// A wait is at least as long as it says. Who waits for a lease asks again every
// few seconds; that wait is counted on for as long as nobody is granted the lease.
// Who waits for another lock asks again after the lockTTL, from which it counts anew.
//
// Losses are those of the process whose [Losses] the page was given. Without, they
// are leases that the page has seen run out without being renewed or given back, or
// taken away by force: of all processes, but only while somebody looked, or with [Options.Background], and no
// others than leases. If the account cannot read these, the losses are not known.
//
// Deadlocks are those that the server has broken, of all who use it.
//
// "Most waited for" is added up from the looks: a wait that began and ended between two
// looks is not in it, nor one behind the first of its process.
package web

import (
	"cmp"
	"crypto/rand"
	"embed"
	"io/fs"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
)

// Options say who may use the page, and for what. The zero value shows it to this
// machine only.
type Options struct {
	// AllowRemote also serves clients on other machines. If you set it, have them
	// authenticated before they come to the Handler.
	AllowRemote bool

	// Hosts are the names, without port, under which the page can be opened, beside
	// localhost and IP addresses.
	Hosts []string

	// AllowRelease lets all who may look break locks, as [inspect.Inspector.Release]
	// does: each after a confirmation, and only if it is still held as it was shown.
	AllowRelease bool

	// Released, where it is not nil, is told who has broken which lock: r is the
	// request, as it came to the Handler, l the lock as it was right before, and reason what the
	// user gave as that, perhaps "". With
	// an err it failed; then some of several holders may have lost the lock, or, where
	// the connection broke, all. It is not told of a lock that was not held any more
	// as it was shown, to which nothing was done. It is called before the answer, at
	// times for several requests at once.
	Released func(r *http.Request, l inspect.Lock, reason string, err error)

	// Losses are those of this process. nil is the leases that the page sees run
	// out.
	Losses *Losses

	// Class returns the class of a key, such as "order:*": the keys most waited for are told
	// by class. [inspect.Classes] makes it of patterns. nil tells them by key. It is called by
	// one goroutine at a time.
	Class func(key string) string

	// Record is the file that a [record.Recorder] writes, on this machine: each lock has its last hour from it. ""
	// is none.
	Record string

	// Background looks at the server also while nobody looks at the page, from New on:
	// every ten seconds, or in each third of the shortest lease, but at most once a second. So
	// the plots, the losses and the keys most waited for also show what was before. What is
	// remembered is bounded: each look of ten minutes, and for four hours of each minute the most
	// that was seen, with the ten classes that were waited for most; and the last twenty losses.
	Background bool
}

// Handler serves the page. Make it with [New]. It is safe for concurrent use.
type Handler struct {
	inspector *inspect.Inspector
	options   Options
	secret    string // what a page has to send to release a lock
	files     http.Handler
	sampler   *sampler

	// writeBound is how long a viewer has to take what is sent.
	writeBound time.Duration
}

//go:embed page
var page embed.FS

// New returns a Handler that has sent nothing to the server yet, but with
// [Options.Background] begins to. Close it in the end.
func New(i *inspect.Inspector, o Options) *Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	return &Handler{
		inspector: i, options: o, secret: rand.Text(), files: http.FileServerFS(files),
		sampler:    newSampler(i, o),
		writeBound: 10 * time.Second,
	}
}

// Close ends the streams, gives up looking at the server, and returns when that has
// ended. Requests are answered with 503 from then on; a release that is under way
// goes on with its own. http.Server.Shutdown would wait for the streams: close the
// Handler before, or with RegisterOnShutdown.
func (h *Handler) Close() { h.sampler.close() }

// ServeHTTP implements [http.Handler].
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	setHeaders(w.Header())
	if why := h.refusal(r); why != "" {
		http.Error(w, why, http.StatusForbidden)
		return
	}
	select {
	case <-h.sampler.done:
		http.Error(w, errClosed.Error(), http.StatusServiceUnavailable)
		return
	default:
	}
	// Where the page is mounted is nobody's concern: what is asked for is the last
	// part of the path. No page is mounted under such a name.
	switch name := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]; name {
	case "page.events":
		if only(w, r, http.MethodGet) {
			h.stream(w, r)
		}
	case "page.history":
		if only(w, r, http.MethodGet) {
			h.history(w, r)
		}
	case "page.release":
		if only(w, r, http.MethodPost) {
			h.release(w, r)
		}
	case "page.js", "page.css", "icon.svg":
		if only(w, r, http.MethodGet, http.MethodHead) {
			h.file(w, r, name)
		}
	default:
		if only(w, r, http.MethodGet, http.MethodHead) {
			h.index(w, r)
		}
	}
}

func only(w http.ResponseWriter, r *http.Request, methods ...string) bool {
	if slices.Contains(methods, r.Method) {
		return true
	}
	w.Header().Set("Allow", strings.Join(methods, ", "))
	http.Error(w, "only "+strings.Join(methods, " and "), http.StatusMethodNotAllowed)
	return false
}

// index serves the page itself, under a path that ends with a slash, to which its
// own references are relative.
func (h *Handler) index(w http.ResponseWriter, r *http.Request) {
	// http.StripPrefix leaves RequestURI as it was. There is none where no net/http
	// server has read the request.
	asked, _, _ := strings.Cut(cmp.Or(r.RequestURI, r.URL.EscapedPath()), "?")
	switch last := path.Base(asked); {
	case strings.HasSuffix(asked, "/"):
		h.file(w, r, "")
	case strings.Contains(last, "."):
		http.NotFound(w, r)
	default:
		w.Header().Set("Location", "./"+last+"/")
		w.WriteHeader(http.StatusMovedPermanently)
	}
}

func (h *Handler) file(w http.ResponseWriter, r *http.Request, name string) {
	own := r.Clone(r.Context())
	own.URL.Path = "/" + name
	h.files.ServeHTTP(w, own)
}
