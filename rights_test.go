package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Every strategy, with an account that has the privileges which the documentation
// names, and not one more.

// rightsOf tells what each way to lock needs on the lock table, and how others ask
// for the key that it holds.
var rightsOf = []struct {
	name          string
	holds, wants  lockctx.Option
	onTheTable    string
	waitsForOther bool
}{
	{"row", lockctx.Row(), lockctx.Row(), "SELECT, INSERT, UPDATE", true},
	{"shared", lockctx.Shared(), lockctx.Row(), "SELECT, INSERT, UPDATE", true},
	{"slots", lockctx.Slots(1), lockctx.Slots(1), "SELECT, INSERT, UPDATE", true},
	{"lease", lockctx.Lease(30 * time.Second), lockctx.Lease(30 * time.Second), "SELECT, INSERT, UPDATE", true},
	{"optimistic", lockctx.Optimistic(), lockctx.Optimistic(), "SELECT, INSERT, UPDATE", false},
	{"advisory", lockctx.Advisory(), lockctx.Advisory(), "", true},
}

// waiting counts those who wait for a lock in the server.
func (s *scratch) waiting() (n int) {
	s.T.Helper()
	dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND COMMAND = 'Query' AND INFO NOT LIKE 'CREATE%' AND ID <> CONNECTION_ID()"+
		" AND (INFO LIKE '%GET_LOCK(%' OR INFO LIKE '%mysqllock%FOR UPDATE%' OR INFO LIKE '%mysqllock%FOR SHARE%' OR INFO LIKE '%mysqllock%LOCK IN SHARE MODE%')",
		s.Name).Scan(&n))
	return n
}

func TestRightsOfEachStrategy(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		_, err := s.open().ExecContext(lockctx.With(dbtest.Limited(t), "made"), "DO 1") // the table, by somebody else
		dbtest.OK(t, err)
		for _, how := range rightsOf {
			for _, schema := range []string{"auto", "manual"} {
				t.Run(how.name+", "+schema, func(t *testing.T) {
					s := s.at(s.For(t))
					grants := []string{"SELECT, UPDATE ON $db.p"}
					if how.onTheTable != "" {
						grants = append(grants, how.onTheTable+" ON $db.mysqllock")
					}
					u := s.user(grants...)
					db, other := u.open("lockSchema="+schema), u.open("lockSchema="+schema)
					key := how.name + dbtest.Random()
					dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10 WHERE id = 1")
					sell := func(ctx context.Context) error {
						tx, err := db.BeginTx(ctx, nil)
						if err != nil {
							return err
						}
						defer tx.Rollback()
						if _, err := tx.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1"); err != nil {
							return err
						}
						return tx.Commit()
					}
					for range 2 { // a new key, and a known one
						dbtest.OK(t, sell(lockctx.With(dbtest.Limited(t), key, how.holds)))
						_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), key, how.holds), "UPDATE p SET stock = stock - 1 WHERE id = 1")
						dbtest.OK(t, err)
					}
					if how.name == "lease" {
						s.renews(db, key)
					}
					s.wantStock(1, 6)
					if !how.waitsForOther {
						return
					}
					h, err := mysqllock.Acquire(dbtest.Limited(t), db, key, how.holds)
					dbtest.OK(t, err)
					s.cancelled(other, key, how.wants)
					granted := make(chan error, 1)
					go func() {
						next, err := mysqllock.Acquire(dbtest.Limited(t), other, key, how.wants, lockctx.Wait(2*time.Minute))
						if err == nil {
							err = next.Release()
						}
						granted <- err
					}()
					dbtest.Soon(t, "it waits", func() bool { return s.waiting() == 1 })
					dbtest.OK(t, h.Release())
					dbtest.OK(t, <-granted)
				})
			}
		}
	})
}

// renews holds a lease until it has been renewed, and writes under it.
func (s *scratch) renews(db *sql.DB, key string) {
	s.T.Helper()
	h, err := mysqllock.Acquire(dbtest.Limited(s.T), db, key, lockctx.Lease(6*time.Second))
	dbtest.OK(s.T, err)
	at := s.expires(key)
	dbtest.Soon(s.T, "it is renewed", func() bool { return s.expires(key) != at })
	_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = stock WHERE id = 1")
	dbtest.OK(s.T, err)
	dbtest.OK(s.T, h.Release())
}

// TestOneRightLess: what is missing is named, soon, and nothing runs without its
// lock.
func TestOneRightLess(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		_, err := s.open().ExecContext(lockctx.With(dbtest.Limited(t), "made"), "DO 1")
		dbtest.OK(t, err)
		for _, how := range rightsOf {
			if how.onTheTable == "" {
				continue
			}
			rights := strings.Split(how.onTheTable, ", ")
			for i, missing := range rights {
				left := strings.Join(slices.Delete(slices.Clone(rights), i, i+1), ", ")
				db := s.user("SELECT, UPDATE ON $db.p", left+" ON $db.mysqllock").open()
				for _, key := range []string{"made", "new " + how.name} {
					what := fmt.Sprintf("%s without %s, %s", how.name, missing, key)
					before := s.stock(1)
					ctx, cancel := context.WithTimeout(t.Context(), dbtest.Patience)
					var e *mysqllock.Error
					err := func() error {
						tx, err := db.BeginTx(lockctx.With(ctx, key, how.holds), nil)
						if err != nil {
							return err
						}
						defer tx.Rollback()
						if _, err := tx.Exec("UPDATE p SET stock = stock - 1 WHERE id = 1"); err != nil {
							return err
						}
						if how.waitsForOther { // where it needs no more, it is locked
							_, err := mysqllock.Acquire(ctx, s.open(), key, how.wants, lockctx.NoWait())
							if !errors.Is(err, mysqllock.ErrLocked) {
								t.Errorf("%s: somebody else gets %v", what, err)
							}
						}
						return tx.Commit()
					}()
					cancel()
					switch {
					case err == nil && s.sparesRight(how.name, missing, key):
						before--
					case !errors.As(err, &e) || e.Key != key || e.Strategy == "" || errors.Is(err, context.DeadlineExceeded) ||
						!strings.Contains(err.Error(), "denied") || !strings.Contains(err.Error(), "SELECT, INSERT, UPDATE"):
						t.Errorf("%s: %v", what, err)
					}
					s.wantStock(1, before)
				}
			}
		}
	})
}

// sparesRight reports whether a right is not needed here: INSERT is for new keys,
// and a server may ask for no more than SELECT to lock a row.
func (s *scratch) sparesRight(how, missing, key string) bool {
	switch how {
	case "row", "shared", "slots":
		return missing == "INSERT" && key == "made" || missing == "UPDATE" && (s.MariaDB() || how == "shared")
	}
	return false
}

// TestRightsOfClaims: they need nothing on the lock table, which need not exist.
func TestRightsOfClaims(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.user("SELECT, UPDATE ON $db.p").open("lockSchema=manual")
		tx, err := db.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		defer tx.Rollback()
		var id int
		dbtest.OK(t, tx.QueryRowContext(lockctx.Claim(dbtest.Limited(t), lockctx.ForUpdate()), "SELECT id FROM p WHERE id = 1").Scan(&id))
		_, err = s.plain.ExecContext(dbtest.Limited(t), "SELECT id FROM p WHERE id = 1 FOR UPDATE NOWAIT")
		if err == nil {
			t.Error("the row is not locked")
		}
		dbtest.OK(t, tx.Commit())
	})
}

// TestRightToTheProcedure: EXECUTE on it alone saves the round trip.
func TestRightToTheProcedure(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.MariaDB() {
			return // which needs none
		}
		_, err := s.open().ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1")
		dbtest.OK(t, err)
		u := s.user("SELECT, INSERT, UPDATE ON $db.mysqllock", "EXECUTE ON PROCEDURE $db.mysqllock_lock1")
		db, tap := u.tapped(mysqllock.Config{})
		dbtest.OK(t, db.Ping())
		_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1")
		dbtest.OK(t, err)
		seen := tap.Since()
		_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1")
		dbtest.OK(t, err)
		if log := seen(); !slices.ContainsFunc(log, func(c dbtest.Command) bool { return strings.HasPrefix(c.Text, "CALL ") }) {
			t.Errorf("sent was %v", log)
		}
	})
}
