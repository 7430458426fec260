// Package form shows a form to somebody who may think about it for as long as
// they like: nothing is locked meanwhile. What is sent counts only if nobody else
// has changed the product since the form was shown.
package form

import (
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Handler shows a product's stock at GET /products/{id} and changes it at POST.
func Handler(db *sql.DB) http.Handler {
	h := handler{db}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /products/{id}", h.show)
	mux.HandleFunc("POST /products/{id}", h.change)
	return mux
}

type handler struct{ db *sql.DB }

// show reads the stock under the version that goes out with it.
func (h handler) show(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	ctx := lockctx.With(r.Context(), "product:"+id, lockctx.Optimistic())
	var stock int
	err := h.db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?", id).Scan(&stock)
	if err != nil {
		fail(w, err)
		return
	}
	version, _ := mysqllock.Version(ctx)
	fmt.Fprintf(w, `<form method="post"><input name="stock" value="%d"><input type="hidden" name="version" value="%d"></form>`+"\n",
		stock, version)
}

// change writes the stock if the version is still the one that was shown.
func (h handler) change(w http.ResponseWriter, r *http.Request) {
	stock, err := strconv.Atoi(r.FormValue("stock"))
	if err != nil {
		http.Error(w, "stock is not a number", http.StatusBadRequest)
		return
	}
	version, err := strconv.ParseUint(r.FormValue("version"), 10, 64)
	if err != nil || version == 0 {
		http.Error(w, "version is not one", http.StatusBadRequest)
		return
	}
	id := r.PathValue("id")
	ctx := lockctx.With(r.Context(), "product:"+id, lockctx.IfVersion(version))
	if _, err := h.db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock, id); err != nil {
		fail(w, err)
		return
	}
	fmt.Fprintln(w, "changed")
}

func fail(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, mysqllock.ErrConflict):
		http.Error(w, "somebody else has changed it: look again", http.StatusConflict)
	case errors.Is(err, mysqllock.ErrLocked):
		http.Error(w, "somebody else is at it", http.StatusServiceUnavailable)
	case errors.Is(err, sql.ErrNoRows):
		http.Error(w, "no such product", http.StatusNotFound)
	default:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}
