package httplock_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/mysqllock/mysqllock"
	httplock "github.com/mysqllock/mysqllock/integrations/http"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/mysqllocktest"
)

func Sell(db *sql.DB) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		err := mysqllock.Do(r.Context(), db, "product:"+id, func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id = ? AND stock > 0", id)
			return err
		}, lockctx.NoWait())
		if err != nil && !httplock.Error(w, err) { // 409 or 503, with Retry-After
			http.Error(w, "not sold", http.StatusInternalServerError)
		}
	}
}

// Another process has the key; the locks are in memory here.
func Example() {
	locks := mysqllocktest.New()
	db, err := locks.Open(nil, mysqllock.Config{}) // sql.Open("mysqllock", dsn)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	other, err := locks.Open(nil, mysqllock.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer other.Close()
	hold, err := mysqllock.Acquire(context.Background(), other, "product:42")
	if err != nil {
		log.Fatal(err)
	}
	defer hold.Rollback()

	mux := http.NewServeMux()
	mux.Handle("POST /products/{id}/sales", Sell(db))
	answer := httptest.NewRecorder()
	mux.ServeHTTP(answer, httptest.NewRequest(http.MethodPost, "/products/42/sales", nil))
	fmt.Println(answer.Code, "Retry-After:", answer.Header().Get("Retry-After"))
	// Output: 409 Retry-After: 1
}
