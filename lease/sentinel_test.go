package lease

import (
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock/lockerr"
)

// TestOwnErrorsHaveSentinels: what a caller is told without a word of the server's says
// what it means.
func TestOwnErrorsHaveSentinels(t *testing.T) {
	for err, want := range map[error]error{errNoAnswer: lockerr.ErrExhausted, errNoRow: lockerr.ErrUnsafe} {
		if !errors.Is(terms.Failure("lock", "k", err), want) {
			t.Errorf("%v is not %v", err, want)
		}
	}
}
