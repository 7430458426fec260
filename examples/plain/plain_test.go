package plain

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestEachJobOfTheShopIsUnderItsLock(t *testing.T) { testshop.Run(t, testShop) }

func testShop(t *testing.T, shop *testshop.Shop) {
	ctx := t.Context()
	db := open(t, shop)

	for name, sell := range map[string]func(context.Context, *sql.DB, int) error{
		"transaction":         Sell,
		"without transaction": SellWithoutTransaction,
	} {
		t.Run(name, func(t *testing.T) {
			shop.Restock(t, 1)
			if err := sell(ctx, db, 1); err != nil {
				t.Fatal(err)
			}
			shop.Want(t, 0, 0)
			// Again and again: what reads and then does not write gives the lock back too.
			for range 3 {
				if err := sell(ctx, db, 1); !errors.Is(err, ErrSoldOut) {
					t.Fatalf("got %v, want %v", err, ErrSoldOut)
				}
			}
		})
	}

	t.Run("two writes after a read", func(t *testing.T) {
		shop.Restock(t, 5)
		if err := SellTooMuch(ctx, db, 1, "Ann"); !errors.Is(err, mysqllock.ErrStaleRead) {
			t.Errorf("got %v, want %v", err, mysqllock.ErrStaleRead)
		}
		shop.Want(t, 5, 1)
	})

	t.Run("logged", func(t *testing.T) {
		var lines bytes.Buffer
		logged, err := OpenLogged(shop.LockDSN(), slog.New(slog.NewTextHandler(&lines, nil)))
		if err != nil {
			t.Fatal(err)
		}
		defer logged.Close()
		hold, err := mysqllock.Acquire(ctx, logged, "job")
		if err != nil {
			t.Fatal(err)
		}
		var id int
		if err := logged.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id); err != nil {
			t.Fatal(err)
		}
		if _, err := db.ExecContext(ctx, fmt.Sprintf("KILL %d", id)); err != nil {
			t.Fatal(err)
		}
		if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("got %v, want %v", err, mysqllock.ErrLost)
		}
		if got := lines.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "lock lost") {
			t.Errorf("logged %q", got)
		}
	})

	t.Run("page", func(t *testing.T) {
		mux := http.NewServeMux()
		page, err := Page(mux, db)
		if err != nil {
			t.Fatal(err)
		}
		defer page.Close()
		server := httptest.NewServer(mux)
		defer server.Close()
		response, err := server.Client().Get(server.URL + "/debug/locks/")
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(text), "<title>") {
			t.Errorf("%s: %v: %.200s", response.Status, err, text)
		}
	})

	t.Run("job", func(t *testing.T) {
		shop.Restock(t, 5)
		if err := Stocktaking(ctx, db, 1, func() (int, error) { return 7, nil }); err != nil {
			t.Fatal(err)
		}
		shop.Want(t, 7, 0)
		broken := errors.New("dropped the list")
		if err := Stocktaking(ctx, db, 1, func() (int, error) { return 0, broken }); !errors.Is(err, broken) {
			t.Errorf("got %v, want %v", err, broken)
		}
		shop.Want(t, 7, 0)
	})

	t.Run("long job", func(t *testing.T) {
		shop.Restock(t, 5)
		var tokens []uint64
		order := func(_ context.Context, _ int, token uint64) (int, error) {
			tokens = append(tokens, token)
			return 2, nil
		}
		for range 2 {
			if err := Restock(ctx, db, []int{1, 1}, order); err != nil {
				t.Fatal(err)
			}
		}
		shop.Want(t, 13, 0)
		if len(tokens) != 4 || tokens[0] != tokens[1] || tokens[2] != tokens[0]+1 {
			t.Errorf("the tokens were %d", tokens)
		}
	})

	t.Run("job that runs already", func(t *testing.T) {
		other := open(t, shop) // as in another process: the two share nothing but the server
		err := Stocktaking(ctx, other, 1, func() (int, error) {
			err := Stocktaking(ctx, db, 1, func() (int, error) { panic("both at once") })
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) {
				t.Errorf("got %v, want ErrLocked at once", err)
			}
			if got := Busy(err); !strings.HasSuffix(got, ` has "stocktaking"`) {
				t.Errorf("Busy says %q", got)
			}
			t.Log(Busy(err))
			return 5, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})

	t.Run("wait that ends", func(t *testing.T) {
		other := open(t, shop)
		hold, err := mysqllock.Acquire(ctx, other, "product:1")
		if err != nil {
			t.Fatal(err)
		}
		defer hold.Rollback()
		hint := lockctx.With(ctx, "product:1", lockctx.Wait(300*time.Millisecond))
		var got string
		for end := time.Now().Add(time.Minute); time.Now().Before(end) && !strings.Contains(got, "connection "); { // a busy server does not say in time who has it
			_, err = db.BeginTx(hint, nil)
			if errors.Is(err, mysqllock.ErrNoAnswer) {
				continue // it did not even say that somebody has it
			}
			if !errors.Is(err, mysqllock.ErrTimeout) {
				t.Fatalf("got %v, want ErrTimeout", err)
			}
			got = Busy(err)
		}
		if !strings.Contains(got, "connection ") || !strings.Contains(got, ` still has "product:1" after `) {
			t.Errorf("Busy says %q", got)
		}
		t.Log(Busy(err))
	})

	if got := Busy(nil) + Busy(ErrSoldOut); got != "" {
		t.Errorf("Busy says %q where nothing is locked", got)
	}
}

func open(t *testing.T, shop *testshop.Shop) *sql.DB {
	t.Helper()
	db, err := Open(shop.LockDSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}
