package queue

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/mysqllock/mysqllock/lockerr"
)

// TestWaitBehindWriter: who shares a key waits for others who do where somebody goes
// before it who wants the key for itself, and else does not.
func TestWaitBehindWriter(t *testing.T) {
	for _, writer := range []bool{false, true} {
		for _, claimed := range []bool{false, true} { // the other one shares it without a place in the line
			for _, last := range []bool{false, true} { // who shares it begins to wait last
				synctest.Test(t, func(t *testing.T) {
					var q Queue
					a, _, _ := q.TryEnter([]string{"a"})
					a.Granted(&lockerr.Holder{})
					var b *Ticket
					if claimed {
						b = q.Claim([]Entry{{Key: "b", Shared: true}})
					} else {
						b, _, _ = q.TryEnterAs([]Entry{{Key: "b", Shared: true}}, false)
						b.Granted(&lockerr.Holder{})
					}
					ctx, cancel := context.WithCancel(t.Context())
					if writer {
						go func() {
							w, err := q.Enter(ctx, []string{"b"})
							if err == nil {
								<-ctx.Done()
								w.Leave()
							}
						}()
						synctest.Wait()
					}
					waits := []*Wanted{
						{Queue: &q, Holds: []*Ticket{a}, Entries: []Entry{{Key: "b", Shared: true}}},
						{Queue: &q, Holds: []*Ticket{b}, Entries: []Entry{{Key: "a"}}},
					}
					first, second := waits[0], waits[1]
					if last {
						first, second = second, first
					}
					done, ok := first.Wait()
					if !ok {
						t.Fatal("the first to wait is refused")
					}
					done2, ok := second.Wait()
					if ok == writer {
						t.Errorf("writer %v, claimed %v, last %v: it may wait: %v", writer, claimed, last, ok)
					}
					if ok {
						done2()
					}
					done()
					cancel()
					synctest.Wait()
					a.Leave()
					b.Leave()
					if len(q.lines) > 0 || len(q.claims) > 0 || len(graph.waits) > 0 {
						t.Error("something is left over")
					}
				})
			}
		}
	}
}
