package httplock_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	httplock "github.com/mysqllock/mysqllock/integrations/http"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestMain(m *testing.M) {
	dbtest.Jobs{"hold": stock.Hold}.Run()
	os.Exit(tempserver.Tests{M: m}.Run())
}

// A server answers while another process has the key, and after it.
func TestAServerAnswersWhileTheKeyIsTaken(t *testing.T) {
	dbtest.OnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
		db := d.Open("mysqllock")
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			wait := lockctx.NoWait()
			if r.URL.Path == "/wait" {
				wait = lockctx.Wait(3 * time.Second)
			}
			err := mysqllock.Do(r.Context(), db, "product:1", func(context.Context) error { return nil }, wait)
			if err != nil && !httplock.Error(w, err) {
				http.Error(w, err.Error(), http.StatusInternalServerError)
			}
		}))
		defer server.Close()
		get := func(path string) (int, string) {
			answer, err := server.Client().Get(server.URL + path)
			dbtest.OK(t, err)
			defer answer.Body.Close()
			return answer.StatusCode, answer.Header.Get("Retry-After")
		}
		if status, _ := get("/"); status != http.StatusOK {
			t.Fatalf("a free key: %d", status)
		}
		other := dbtest.StartJob(t, "hold", d.DSN())
		if said := <-other.Said(); said != "holds" {
			t.Fatal(said)
		}
		if status, again := get("/"); status != http.StatusConflict || again != "1" {
			t.Errorf("a key that another process has: %d, again after %q", status, again)
		}
		if status, again := get("/wait"); status != http.StatusServiceUnavailable || again != "1" {
			t.Errorf("after a wait for it: %d, again after %q", status, again)
		}
		other.Tell("end")
		if said := <-other.Said(); said != "ended <nil>" {
			t.Fatal(said)
		}
		if status, _ := get("/"); status != http.StatusOK {
			t.Errorf("a key that is free again: %d", status)
		}
	})
}

func TestErrorsWorthARetryHaveAStatus(t *testing.T) {
	of := func(op string, err error) error { return fmt.Errorf("selling: %w", &mysqllock.Error{Op: op, Err: err}) }
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{errors.New("sold out"), 0},
		{of("lock", mysqllock.ErrUnsafe), 0},
		{of("lock", mysqllock.ErrStaleRead), 0},
		{of("lock", errors.New("bad hint")), 0},
		{of("commit", mysqllock.ErrLost), 0},
		{of("release", mysqllock.ErrLost), 0},
		{of("statement", mysqllock.ErrLost), http.StatusServiceUnavailable},
		{of("lock", mysqllock.ErrLocked), http.StatusConflict},
		{of("commit", mysqllock.ErrConflict), http.StatusConflict},
		{of("lock", mysqllock.ErrTimeout), http.StatusServiceUnavailable},
		{of("lock", mysqllock.ErrExhausted), http.StatusServiceUnavailable},
		{of("lock", mysqllock.ErrNoAnswer), http.StatusServiceUnavailable},
		{of("lock", mysqllock.ErrDeadlock), http.StatusServiceUnavailable},
	} {
		if got, ok := httplock.Status(c.err); got != c.want || ok != (c.want != 0) {
			t.Errorf("%v: %d, %v, want %d", c.err, got, ok, c.want)
		}
		w := httptest.NewRecorder()
		if httplock.Error(w, c.err) != (c.want != 0) || c.want != 0 && w.Code != c.want {
			t.Errorf("%v is answered with %d", c.err, w.Code)
		}
	}
}
