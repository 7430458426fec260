package testshop

import (
	"context"
	"errors"
	"testing"
)

// Race has eight goroutines sell three units: three of them must succeed, and the others
// get soldOut.
func (s *Shop) Race(t *testing.T, soldOut error, sell func(context.Context) error) {
	t.Helper()
	const stock, goroutines = 3, 8
	s.Restock(t, stock)
	start, errs := make(chan struct{}), make(chan error, goroutines)
	for range goroutines {
		go func() {
			<-start
			errs <- sell(t.Context())
		}()
	}
	close(start)
	sold := 0
	for range goroutines {
		switch err := <-errs; {
		case err == nil:
			sold++
		case !errors.Is(err, soldOut):
			t.Errorf("got %v, want %v", err, soldOut)
		}
	}
	if sold != stock {
		t.Errorf("%d were sold of %d", sold, stock)
	}
	s.Want(t, 0, stock)
}
