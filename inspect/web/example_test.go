package web_test

import (
	"database/sql"
	"log"
	"log/slog"
	"net/http"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
)

// Beside pprof, with the losses of the application's own locks.
func Example() {
	cfg, err := mysql.ParseDSN("app:pw@tcp(127.0.0.1:3306)/shop")
	if err != nil {
		log.Fatal(err)
	}
	losses := new(web.Losses)
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Observer: losses})
	if err != nil {
		log.Fatal(err)
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	i, err := inspect.New(db, inspect.Options{})
	if err != nil {
		log.Fatal(err)
	}
	page := web.New(i, web.Options{Losses: losses})
	defer page.Close()
	mux := http.NewServeMux()
	mux.Handle("/debug/locks/", page)
	srv := &http.Server{Addr: "localhost:6060", Handler: mux}
	srv.RegisterOnShutdown(page.Close)
}

// Locks can be broken by those whom the application knows, and it is logged by whom.
func ExampleOptions() {
	mount := func(mux *http.ServeMux, i *inspect.Inspector, authenticated func(http.Handler) http.Handler, user func(*http.Request) string) *web.Handler {
		page := web.New(i, web.Options{
			AllowRelease: true,
			Released: func(r *http.Request, l inspect.Lock, reason string, err error) {
				slog.Warn("lock broken", "by", user(r), "key", l.Key, "strategy", l.Strategy, "holders", l.Holders.List, "reason", reason, "err", err)
			},
		})
		mux.Handle("/debug/locks/", authenticated(page))
		return page
	}
	_ = mount
}
