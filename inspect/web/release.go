package web

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/inspect"
)

// release breaks the lock that the page names, if it is held as the page has
// shown it.
func (h *Handler) release(w http.ResponseWriter, r *http.Request) {
	if !h.options.AllowRelease {
		http.Error(w, "The page of locks does not release any, unless its AllowRelease says otherwise.", http.StatusForbidden)
		return
	}
	if err := http.NewCrossOriginProtection().Check(r); err != nil {
		http.Error(w, err.Error(), http.StatusForbidden)
		return
	}
	secret := r.Header.Get("X-Mysqllock-Secret")
	if subtle.ConstantTimeCompare([]byte(secret), []byte(h.secret)) != 1 {
		http.Error(w, "This page is older than what it asks: load it again.", http.StatusForbidden)
		return
	}
	var asked struct {
		Ref    string `json:"ref"`
		Reason string `json:"reason"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4000)).Decode(&asked); err != nil {
		http.Error(w, "bad request: "+err.Error(), http.StatusBadRequest)
		return
	}
	snap, err := h.inspector.Snapshot(r.Context(), inspect.Filter{})
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	i := slices.IndexFunc(snap.Locks, func(l inspect.Lock) bool { return ref(l) == asked.Ref })
	if i < 0 {
		http.Error(w, inspect.ErrChanged.Error(), http.StatusConflict)
		return
	}
	why := "on the page of locks, from " + r.RemoteAddr
	if asked.Reason != "" {
		why = asked.Reason + " (" + why + ")"
	}
	done, err := h.inspector.Release(r.Context(), snap.Locks[i], why)
	if h.options.Released != nil && !errors.Is(err, inspect.ErrChanged) {
		h.options.Released(r, snap.Locks[i], asked.Reason, err)
	}
	switch {
	case errors.Is(err, inspect.ErrChanged):
		http.Error(w, inspect.ErrChanged.Error(), http.StatusConflict)
	case errors.Is(err, inspect.ErrNotKnown):
		http.Error(w, err.Error(), http.StatusConflict)
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadGateway)
	case len(done.Killed) > 0:
		fmt.Fprintf(w, "Released: ended connection %s.", strings.Trim(fmt.Sprint(done.Killed), "[]"))
	default:
		fmt.Fprintf(w, "Released: the lease is broken, and its token is %d now.", done.Token)
	}
}
