package inspect_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestNeighbourSplitsPages: a neighbour's inserts move the row's locks to another page, and MySQL
// tells its thread of them. The holder, those who wait and the chain stay what they are, a
// refused caller is told the holder, and a forced release ends the holder's connection.
func TestNeighbourSplitsPages(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		for _, sharing := range []string{"", "shared"} {
			t.Run(sharing, func(t *testing.T) {
				s := *s
				s.Database = s.For(t)
				key, behind := sharing+"s:500", sharing+"behind"
				var opts []lockctx.Option
				if sharing != "" {
					opts = append(opts, lockctx.Shared())
				}
				i := s.inspector(s.open("root"))
				hold, err := mysqllock.Acquire(t.Context(), s.process("root", "holder"), key, opts...)
				dbtest.OK(t, err)
				next := s.process("root", "next")
				ctx, cancel := context.WithCancel(context.Background())
				var waiting sync.WaitGroup
				granted := make(chan error, 1)
				waiting.Go(func() { // has one key, and waits for the other
					granted <- mysqllock.Do(ctx, next, behind, func(ctx context.Context) error {
						return mysqllock.Do(ctx, next, key, func(context.Context) error { return nil }, lockctx.Wait(2*dbtest.Patience))
					})
				})
				t.Cleanup(func() { cancel(); waiting.Wait() })
				dbtest.Soon(t, "next waits", func() bool {
					l := find(look(t, i), "row", key)
					return l != nil && len(l.Waiters.List) == 1
				})
				s.queue(func() int {
					if l := find(look(t, i), "row", behind); l != nil {
						return len(l.Waiters.List)
					}
					return 0
				}, "root", behind, 1)
				neighbour, alive := s.SplitPages("mysqllock", s.Name, key)

				var snap *inspect.Snapshot
				var l *inspect.Lock
				// MariaDB does not tell a holder that shares a row from one of another test, for as long as that holds.
				whole := func(l *inspect.Lock) bool {
					return l != nil && len(l.Holders.List) > 0 && len(l.Waiters.List) > 0 && l.Holders.List[0].ConnectionID != 0
				}
				dbtest.Soon(t, "both holders and their waiters are shown", func() bool {
					snap = look(t, i)
					l = find(snap, "row", key)
					return whole(l) && whole(find(snap, "row", behind))
				})
				is := func(what string, c inspect.Client, want string) {
					t.Helper()
					program := c.Program
					if id := strconv.FormatUint(c.ConnectionID, 10); id == neighbour {
						program = "the neighbour"
					}
					if program != want && (s.mysql() || program != "") {
						t.Errorf("%s is %s, and shown is %s: %+v", what, want, program, c)
					}
				}
				if len(l.Holders.List) != 1 || len(l.Waiters.List) != 1 {
					t.Errorf("%s: %+v", key, l)
				}
				is("the holder", l.Holders.List[0].Client, "holder")
				is("the waiter", l.Waiters.List[0].Client, "next")
				if h := l.Holders.List[0]; h.Shared != (sharing != "") || s.mysql() && h.Activity == nil {
					t.Errorf("the holder: %+v", h)
				}
				chain := snap.Chain(find(snap, "row", behind))
				if len(chain) != 2 || chain[1].Lock.Key != key {
					t.Errorf("the chain is %+v", chain)
				} else {
					is("the first of the chain", chain[0].Holder.Client, "next")
					is("the last of the chain", chain[1].Holder.Client, "holder")
				}
				_, err = mysqllock.Acquire(t.Context(), s.process("root", "asker"), key, lockctx.NoWait())
				var e *mysqllock.Error
				switch {
				case !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrLocked):
					t.Errorf("asked without a wait: %v", err)
				case s.mysql() && (e.Holder == nil || e.Holder.Program != "holder"):
					t.Errorf("the error says that the holder is %v", e.Holder)
				}

				var done *inspect.Released
				dbtest.Soon(t, "it is known who has it", func() bool {
					done, err = i.Release(t.Context(), *l, "")
					return s.mysql() || !errors.Is(err, inspect.ErrNotKnown)
				})
				if err != nil || fmt.Sprint(done.Killed) != fmt.Sprintf("[%d]", l.Holders.List[0].ConnectionID) {
					t.Errorf("released: %+v, %v", done, err)
				}
				if !alive() {
					t.Fatal("the neighbour's connection was ended")
				}
				dbtest.OK(t, <-granted)
				dbtest.Is(t, "the holder gives it back", hold.Release(), lockerr.ErrLost)
			})
		}
	})
}
