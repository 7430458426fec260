package plain

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

func TestAnEventIsHandledOnce(t *testing.T) { testshop.Run(t, testWebhook) }

func testWebhook(t *testing.T, shop *testshop.Shop) {
	db := open(t, shop)
	shop.Restock(t, 5)
	fails, working, finish := errors.New("not now"), make(chan struct{}), make(chan struct{})
	work := func(ctx context.Context, event []byte) error {
		if _, err := db.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id = 1"); err != nil {
			return err
		}
		switch string(event) {
		case "fails":
			return fails
		case "waits":
			close(working)
			<-finish
		}
		return nil
	}
	hook := Webhook(db, work)
	deliverIn := func(ctx context.Context, id, event string) int {
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader(event))
		r.Header.Set("Event-Id", id)
		w := httptest.NewRecorder()
		hook(w, r)
		return w.Code
	}
	deliver := func(id, event string) int { return deliverIn(t.Context(), id, event) }
	want := func(what string, got, want, stock int) {
		t.Helper()
		if got != want {
			t.Errorf("%s: status %d, want %d", what, got, want)
		}
		if got := shop.Stock(t); got != stock {
			t.Errorf("%s: stock is %d, want %d", what, got, stock)
		}
	}
	want("no id", deliver("", "sold"), http.StatusBadRequest, 5)
	want("what fails", deliver("a", "fails"), http.StatusInternalServerError, 5)
	want("the next try", deliver("a", "sold"), http.StatusOK, 4)
	want("again", deliver("a", "sold"), http.StatusOK, 4)
	first := make(chan int)
	go func() { first <- deliver("b", "waits") }()
	<-working
	want("at the same time", deliver("b", "sold"), http.StatusConflict, 4)
	close(finish)
	want("the first", <-first, http.StatusOK, 3)
	want("after it", deliver("b", "sold"), http.StatusOK, 3)

	working, finish = make(chan struct{}), make(chan struct{})
	ctx, hangUp := context.WithCancel(t.Context())
	go func() { first <- deliverIn(ctx, "c", "waits") }()
	<-working
	hangUp()
	want("the sender has hung up, and asks again", deliver("c", "sold"), http.StatusConflict, 3)
	close(finish)
	want("it goes on", <-first, http.StatusOK, 2)
	want("after that", deliver("c", "sold"), http.StatusOK, 2)
}
