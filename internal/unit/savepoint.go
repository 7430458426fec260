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

// savepoints is what a unit knows of those in its transaction.
type savepoints struct {
	saves int // of the driver's so far, for their names
	// The transaction was open before its first row lock, and may have savepoints that are older: unit.lock
	// has set it.
	hasOlder bool
	younger  map[string]bool // savepoints of the caller's text that are younger; only where hasOlder
}

// noteSavepoint remembers a savepoint that is younger than a row lock, where hasOlder. It stays so:
// the name can lead to no older one any more, since a new savepoint replaces the old
// one of its name.
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

// toYounger reports whether text goes back to a savepoint that is younger than a row
// lock, which frees no lock.
func (s *savepoints) toYounger(text string) bool {
	name, back, ok := sqltext.Savepoint(text)
	return ok && back && s.younger[name]
}

// mayFree reports whether st goes back to a savepoint that may be older than a row lock, which
// would free the lock. Nothing is done about it at once: send asks rolledBack before the statement,
// and stillLocked is a doubt that is resolved before the next statement, or COMMIT.
func (s *savepoints) mayFree(st *statement.Statement) bool {
	return s.hasOlder && st.Info.GoesBack && !s.toYounger(st.Text)
}

// rolledBack tells how often a storage engine has rolled back its whole part of a
// transaction on this connection. An engine that had no part in the transaction when
// a savepoint was set does so when the transaction goes back to it, and InnoDB's row
// locks go with that. One that had, keeps them. (Measured on MySQL 9.7 and MariaDB
// 10.11. MySQL counts its binary log as an engine.) Tablets show no counters of the connection.
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

// stillLocked looks at what going back to a savepoint did to the row locks. before is
// what rolledBack told before it. Where the locks may be gone, another holder may have come
// and gone since, so that taking them again would not do.
func (u *unit) stillLocked(ctx context.Context, before string) error {
	now, err := rolledBack(ctx, u.link.Conn, u.l.Info())
	if err == nil && now != before {
		err = errors.New("the transaction has gone back to a savepoint that is older than the lock, which frees the lock; " +
			"take the lock before the savepoint, or begin the transaction with the lock context")
	}
	return err
}

// goBack undoes what was done in a transaction that is a savepoint. If it may be older than a row
// lock, the way is that of a caller's statement, which looks whether the lock is still there.
func (u *unit) goBack(op string, t *inner) error {
	text := "ROLLBACK TO SAVEPOINT " + t.save
	if !u.hasOlder || t.younger {
		return u.text(context.Background(), op, text)
	}
	_, _, err := u.run(context.Background(), &statement.Statement{Text: text, Info: sqltext.Look(text)})
	return err
}
