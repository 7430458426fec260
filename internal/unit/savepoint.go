package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// savepoints is what a unit knows of the savepoints in its transaction.
type savepoints struct {
	saves int // how many the driver has set so far, for their names
	// hasOlder: the transaction was open before its first row lock, so the caller may have set savepoints
	// that are older than the lock. unit.lock sets it.
	hasOlder bool
	younger  map[string]bool // names of savepoints in SQL text that are younger than a row lock; only if hasOlder
}

// noteSavepoint remembers a savepoint of the caller that is younger than a row lock, if hasOlder. From then
// on its name leads to no older savepoint, since a new one replaces the old one of its name.
func (s *savepoints) noteSavepoint(st *statement.Statement) {
	if st.Info.Kind != sqltext.Write {
		return
	}
	if name, back, ok := sqltext.Savepoint(st.Text); ok && !back {
		if s.younger == nil {
			s.younger = make(map[string]bool)
		}
		s.younger[name] = true
	}
}

// toYounger reports whether text goes back to a savepoint that is younger than a row lock. That frees no
// lock.
func (s *savepoints) toYounger(text string) bool {
	name, back, ok := sqltext.Savepoint(text)
	return ok && back && s.younger[name]
}

// mayFree reports whether st goes back to a savepoint that may be older than a row lock, which would free
// the lock. The unit finds out later: doubtful calls rolledBack before the statement, and stillLocked is
// a doubt that is resolved before the next statement, or COMMIT.
func (s *savepoints) mayFree(st *statement.Statement) bool {
	return s.hasOlder && st.Info.GoesBack && !s.toYounger(st.Text)
}

// rolledBack returns how often a storage engine has rolled back its whole part of a transaction on this
// connection. An engine that had no part in the transaction when a savepoint was set does so when the
// transaction goes back to that savepoint, and InnoDB frees its row locks with that. An engine that had a
// part keeps its locks. (Measured on MySQL 9.7 and MariaDB 10.11. MySQL counts its binary log as an
// engine.) Tablets show no counters of the connection.
func rolledBack(ctx context.Context, base driver.Conn, info server.Info) (string, error) {
	if info.Tablets {
		return "", lockerr.With(lockerr.ErrUnsafe, errors.New("the savepoint may be older than the lock, "+
			"and nothing shows whether going back to it frees the lock; "+
			"take the lock before the savepoint, or begin the transaction with the lock context"))
	}
	rows, err := server.Query(ctx, base, "SHOW SESSION STATUS LIKE 'Handler_rollback'")
	if err == nil && (len(rows) != 1 || len(rows[0]) != 2) {
		err = lockerr.With(lockerr.ErrLost, errors.New("the server does not say whether going back to a savepoint would free the lock"))
	}
	if err != nil {
		return "", err
	}
	return rows[0][1], nil
}

// stillLocked returns an error if going back to a savepoint may have freed row locks. before is what
// rolledBack returned before that. To take such locks again would not do: another holder may have come
// and gone in between.
func (u *unit) stillLocked(ctx context.Context, before string) error {
	now, err := rolledBack(ctx, u.session.Conn, u.l.Info())
	if err == nil && now != before {
		err = errors.New("the transaction has gone back to a savepoint that is older than the lock, which frees the lock; " +
			"take the lock before the savepoint, or begin the transaction with the lock context")
	}
	return err
}

// goBack undoes all statements since the savepoint of t. If the savepoint may be older than a row lock,
// goBack runs as a caller's statement does, so that the unit asks whether the lock is still there.
func (u *unit) goBack(op string, t *inner) error {
	text := "ROLLBACK TO SAVEPOINT " + t.save
	if !u.savepoints.hasOlder || t.younger {
		return u.text(context.Background(), op, text)
	}
	_, _, err := u.run(context.Background(), &statement.Statement{Text: text, Info: sqltext.Look(text)})
	return err
}
