package chaos

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// Ways of locking that do not hold. The checks must see each of them.

// decide begins a transaction, has lock run in it for the key, and decides what to
// write. Where it fails no transaction is left.
func (t *transfer) decide(ctx context.Context, lock, key string) (_ *sql.Tx, a account, err error) {
	begun := now()
	tx, err := t.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, a, err
	}
	if _, err = tx.ExecContext(ctx, lock, key); err == nil {
		a, err = t.read(ctx, tx, begun, key)
	}
	if err != nil {
		_ = tx.Rollback()
		return nil, a, err
	}
	t.think(ctx)
	return tx, t.moved(a), nil
}

// retrying locks the row itself, and runs its write once more on another connection
// where the first was lost: with what it had read, and without the lock.
func retrying(w *worker, ctx context.Context) {
	t, key := w.transfer(), w.key()
	tx, a, err := t.decide(ctx, "SELECT 1 FROM account WHERE k = ? FOR UPDATE", key)
	if err != nil {
		t.end(err, false)
		return
	}
	defer tx.Rollback()
	t.attempt(a)
	switch err = t.write(ctx, tx, a); {
	case err == nil: // what is run again after a COMMIT may be there twice, and nothing lost
		err = tx.Commit()
	case broken(err):
		err = t.write(ctx, w.db, a)
	}
	t.end(err, true)
}

// releasingEarly gives its lock back before COMMIT.
func releasingEarly(w *worker, ctx context.Context) {
	t, key := w.transfer(), w.key()
	tx, a, err := t.decide(ctx, "DO GET_LOCK(?, 10)", key)
	if err != nil {
		t.end(err, false)
		return
	}
	defer tx.Rollback()
	err = t.write(ctx, tx, a)
	if _, failed := tx.ExecContext(context.WithoutCancel(ctx), "DO RELEASE_LOCK(?)", key); err == nil {
		err = failed
	}
	if err != nil {
		t.end(err, false)
		return
	}
	t.attempt(a)
	t.end(tx.Commit(), true)
}

// wrongWays are the jobs that are done wrong, with the fault that shows it.
var wrongWays = []struct {
	job   string
	about string
	fault *fault
	seen  func(*arena) bool
}{
	{"no fence", "a lease without the check before COMMIT", clockSet, (*arena).lostUpdate},
	{"late notice", "a holder who is told a TTL too late that its lease has run out", blackHole, (*arena).lockedTwice},
	{"retry without the lock", "a lost connection's write is run again on another, without the lock", connectionsKilled, (*arena).lostUpdate},
	{"release before COMMIT", "the lock is given back before COMMIT", noFault, (*arena).lostUpdate},
}

func (a *arena) lostUpdate() bool {
	b, err := readBooks(a.t.Context(), a.admin(), a.database)
	a.must(err)
	a.must(a.history.refresh())
	return len(b.overwritten(a.history)) > 0
}

func (a *arena) lockedTwice() bool {
	a.must(a.history.refresh())
	return len(a.history.checkLocks(a.unsure, a.doubtful)) > 0
}

// TestTheChecksSeeWrongWays shows that the checks see what they are for.
func TestTheChecksSeeWrongWays(t *testing.T) {
	t.Parallel()
	bins := tempserver.EachFlavour(tempserver.RequireOwn(t))
	if length(t) == 0 { // what the checks see does not depend on the server
		bins = bins[:1]
	}
	// MariaDB from 11.6 on would see by itself some of what goes wrong.
	onArenas(t, bins, func(t *testing.T, host *arena) {
		for i, wrong := range wrongWays {
			t.Run(wrong.job, func(t *testing.T) {
				t.Parallel()
				a := host.beside(t, fmt.Sprint("wrong", i))
				start := time.Now()
				a.begin(2, 4, wrong.job)
				for !wrong.seen(a) {
					if time.Since(start) > patience {
						t.Fatalf("not seen within %v", patience)
					}
					a.inflict(wrong.fault)
				}
				page.saw(wrong.job, a.topology, time.Since(start))
				t.Logf("seen after %v", time.Since(start).Round(time.Millisecond))
				b := a.end()
				if _, known := a.judge(b); len(known) > 0 {
					t.Error("taken for what is known:", known)
				}
				if found := a.history.checkAccounts(b, a.doubtful); wrong.job != "late notice" && len(found) == 0 {
					t.Error("the check of the accounts' histories does not see it:", b.overwritten(a.history))
				} else if wrong.job == "late notice" && len(found) > 0 {
					t.Error("the fence lets it through:", found)
				}
			})
		}
	}, "--loose-innodb-snapshot-isolation=OFF")
}
