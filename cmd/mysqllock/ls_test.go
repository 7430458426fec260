package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestLs: what is shown of a key that one holds and five wait for is what the test
// knows, for each strategy. MariaDB shows row locks from a copy that it renews when
// nobody has looked for 100 ms, so nobody else may.
func TestLs(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		for strategy, option := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(5 * time.Minute), "advisory": lockctx.Advisory(),
		} {
			t.Run(strategy, func(t *testing.T) {
				s := *s
				s.Database = s.For(t)
				key := "contended-" + strategy
				hold, err := mysqllock.Acquire(context.Background(), s.process("the holder"), key, option)
				dbtest.OK(t, err)
				ctx, cancel := context.WithCancel(context.Background())
				var waiting sync.WaitGroup
				t.Cleanup(func() { cancel(); waiting.Wait(); dbtest.OK(t, hold.Release()) })
				var names []string
				var since []time.Time
				for i := range 5 {
					names = append(names, fmt.Sprintf("waiter %d", i+1))
					db := s.process(names[i])
					waiting.Go(func() {
						if hold, err := mysqllock.Acquire(ctx, db, key, option, lockctx.Wait(time.Hour)); err == nil {
							_ = hold.Release()
						}
					})
					dbtest.Soon(t, names[i]+" waits", func() bool {
						time.Sleep(150 * time.Millisecond)
						return s.waiters(key) == i+1
					})
					since = append(since, time.Now())
				}
				// Who waits for an advisory lock asks anew now and then, and is not seen for a moment.
				var asked time.Time
				var l jsonLock
				dbtest.Soon(t, "ls shows all", func() bool {
					time.Sleep(150 * time.Millisecond)
					asked = time.Now()
					var snap jsonSnapshot
					s.command("ls", "--json").read(&snap)
					i := slices.IndexFunc(snap.Locks, func(l jsonLock) bool { return l.Key == key && l.Strategy == strategy })
					if i < 0 {
						return false
					}
					l = snap.Locks[i]
					return len(l.Waiters) == len(names)
				})
				token, _ := l.Token.Get()
				if len(l.Holders) != 1 || l.Holders[0].Program != "the holder" || token != hold.Token() || l.Namespace != s.Name {
					t.Errorf("the holder: %+v", l)
				}
				if lease := strategy == "lease"; (l.Expires != nil) != lease || (l.Remaining > 0) != lease || l.Remaining > ms(5*time.Minute) {
					t.Errorf("the lease: %+v", l)
				}
				var shown, patient []string // patient are those who have not asked again since, from behind
				for n, w := range l.Waiters {
					shown = append(shown, w.Program)
					if i := slices.Index(names, w.Program); i >= 0 && w.Least >= ms(asked.Sub(since[i])) {
						patient = append(patient, w.Program)
					}
					if n > 0 && w.Least > l.Waiters[n-1].Least {
						t.Errorf("the %d. has waited longer than the one before: %+v", n+1, l.Waiters)
					}
				}
				if !slices.IsSorted(patient) || strategy == "row" && len(patient) < 5 {
					t.Errorf("in the queue are %v", patient)
				}
				if slices.Sort(shown); !slices.Equal(shown, names) {
					t.Errorf("the waiters are %v", shown)
				}
				var out string
				dbtest.Eventually(t, "show has all", func() error {
					out = s.command("show", key).start().must(0)
					for _, want := range append(names, "KEY ", "the holder", "holds", "waits, 5.") {
						if !strings.Contains(out, want) {
							return fmt.Errorf("no %q:\n%s", want, out)
						}
					}
					return nil
				})
				if strings.Contains(out, "\x1b") {
					t.Errorf("show has colours:\n%q", out)
				}
			})
		}
	})
}
