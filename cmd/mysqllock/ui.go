package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
)

func newUI(at *target) *cobra.Command {
	var listen string
	var o web.Options
	c := &cobra.Command{
		Use:   "ui",
		Short: "Serve a page that shows who has locks, and who waits",
		Long: `ui serves a page that shows who has locks and who waits, as it changes, to browsers
on this machine; with --allow-remote also to others. It asks the server only while
somebody looks.

With --allow-release each lock that is broken is a line on standard error: who had it,
and from which address that was asked.

The page is under an address that nobody can guess, another one each time: whoever
knows the address, of all who have an account on the machine, sees the keys and, with
--allow-release, can break locks. With --allow-remote it goes over the network in the
clear: put something in front that encrypts.`,
		Example: `  mysqllock ui
  ssh -L 8080:127.0.0.1:8080 web-1 mysqllock ui --listen 127.0.0.1:8080`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				if _, err := i.Snapshot(ctx, inspect.Filter{}); err != nil {
					return err // now, not on the page
				}
				l, err := listenFor(ctx, listen, o.AllowRemote)
				if err != nil {
					return err
				}
				secret := "/" + rand.Text() + "/" // all accounts of the machine can reach the port
				fmt.Fprintf(c.OutOrStdout(), "http://%s%s\n", l.Addr(), secret)
				o.Released = func(r *http.Request, lock inspect.Lock, reason string, err error) {
					logRelease(c.ErrOrStderr(), r, lock, reason, err)
				}
				return serve(ctx, l, secret, web.New(i, o))
			})
		},
	}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "`address` to listen on; port 0 is any that is free")
	c.Flags().BoolVar(&o.AllowRemote, "allow-remote", false, "also for other machines")
	c.Flags().StringSliceVar(&o.Hosts, "host", nil, "`names` under which the page may be opened, beside localhost and addresses")
	c.Flags().StringVar(&o.Record, "record", "", "also show the last hour of a key, from the `file` that record writes")
	c.Flags().BoolVar(&o.AllowRelease, "allow-release", false, "the page may break locks, each after a question")
	return c
}

// logRelease says who has broken which lock, from where, when, and why.
func logRelease(w io.Writer, r *http.Request, lock inspect.Lock, reason string, err error) {
	holders := "nobody that is shown"
	if list := lock.Holders.List; len(list) > 0 {
		holders = party(list[0].Client)
	}
	outcome := "released"
	if err != nil {
		outcome = "not released: " + err.Error()
	}
	if reason != "" {
		outcome += "; reason: " + strconv.Quote(reason)
	}
	fmt.Fprintf(w, "%s %s asked to take the %s lock on %s from %s: %s\n", time.Now().UTC().Format(time.RFC3339),
		printable(r.RemoteAddr), lock.Strategy, printable(label(lock, false)), printable(holders), printable(outcome))
}

// listenFor listens, where others can reach that only if they may.
func listenFor(ctx context.Context, address string, allowRemote bool) (net.Listener, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	if at, ok := l.Addr().(*net.TCPAddr); !allowRemote && (!ok || !at.IP.IsLoopback()) {
		l.Close()
		return nil, fmt.Errorf("other machines can reach %s: say --allow-remote, or listen on 127.0.0.1", address)
	}
	return l, nil
}

// serve serves the page under path until ctx ends.
func serve(ctx context.Context, l net.Listener, path string, page *web.Handler) error {
	mux := http.NewServeMux()
	mux.Handle(path, page)
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	s.RegisterOnShutdown(page.Close)
	over := context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		if s.Shutdown(ctx) != nil {
			_ = s.Close()
		}
	})
	defer over()
	err := s.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
