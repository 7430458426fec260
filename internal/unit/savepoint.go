package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// savepoints is what a unit knows of those in its transaction.
type savepoints struct {
	saves   int             // of the driver's so far, for their names
	late    bool            // the transaction was open before its first row lock, and may have savepoints that are older
	younger map[string]bool // savepoints of the caller's text that are younger; only where late
}

// nest begins a transaction inside the unit: on a session without one it is the
// session's own, else a savepoint.
func (u *unit) nest(ctx context.Context, t *Tx, opts driver.TxOptions) error {
	if opts != (driver.TxOptions{}) && opts != u.opts {
		return u.error("begin", lockerr.With(lockerr.ErrUnsafe, errors.New(
			"its unit of work has a transaction with other options open; only the outermost BeginTx can choose them")))
	}
	if u.cause != nil {
		return u.cause
	}
	t.u, t.opts = u, u.opts
	if len(u.stack) > 0 || u.hold != nil {
		u.saves++
		t.save, t.locked = fmt.Sprintf("mysqllock_%d", u.saves), len(u.rows) > 0
		if err := u.text(ctx, "begin", "SAVEPOINT "+t.save); err != nil {
			return err
		}
	}
	u.stack = append(u.stack, t)
	return nil
}

// endTx ends a transaction of the caller: the unit's own, or a savepoint in it.
func (u *unit) endTx(t *Tx, commit bool) error {
	op := "rollback"
	if commit {
		op = "commit"
	}
	last := len(u.stack) - 1
	switch {
	case t.failed != nil:
		return t.failed
	case u.state == ended:
		return u.cause
	case u.stack[last] != t:
		err := u.error(op, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"transactions of one lock context must end in the reverse order in which they began; the whole unit of work is rolled back")))
		for _, open := range u.stack {
			open.failed = err
		}
		u.stack = nil
		_ = u.finish(false)
		return err
	}
	u.stack = u.stack[:last]
	switch {
	case t.save == "" && commit:
		return u.commit()
	case t.save == "":
		return u.finish(false)
	}
	if commit && u.cause == nil && u.streaming() {
		return nil // the savepoint goes with the transaction
	}
	u.cutStream()
	var err error
	if commit {
		err = u.text(context.Background(), op, "RELEASE SAVEPOINT "+t.save)
	} else {
		err = u.goBack(op, t)
	}
	if err != nil {
		u.fail(err, false) // its changes must not be committed by an outer transaction
	}
	return err
}

// goBack undoes what was done in a transaction that is a savepoint.
func (u *unit) goBack(op string, t *Tx) error {
	text := "ROLLBACK TO SAVEPOINT " + t.save
	if !u.late || t.locked {
		return u.text(context.Background(), op, text)
	}
	_, _, err := u.run(context.Background(), &statement.Statement{Text: text, Info: sqltext.Look(text)})
	return err
}

// noteSavepoint remembers a savepoint that is younger than a row lock. It stays so:
// the name can lead to no older one any more, since a new savepoint replaces the old
// one of its name.
func (s *savepoints) noteSavepoint(st *statement.Statement) {
	if !s.late || st.Info.Kind != sqltext.Write {
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

// rolledBack tells how often a storage engine has rolled back its whole part of a
// transaction on this connection. An engine that had no part in the transaction when
// a savepoint was set does so when the transaction goes back to it, and InnoDB's row
// locks go with that. One that had, keeps them. (Measured on MySQL 9.7 and MariaDB
// 10.11. MySQL counts its binary log as an engine.)
func (u *unit) rolledBack(ctx context.Context) (string, error) {
	rows, err := server.Query(ctx, u.link.Conn, "SHOW SESSION STATUS LIKE 'Handler_rollback'")
	if err == nil && (len(rows) != 1 || len(rows[0]) != 2) {
		err = lockerr.With(lockerr.ErrLost, errors.New("the server does not say whether going back to a savepoint would free the lock"))
	}
	if err != nil {
		return "", err
	}
	return rows[0][1], nil
}

// stillLocked looks at what going back to a savepoint did to the row locks. before is
// what rolledBack told before it, and err is what it returned. Where the locks may be
// gone, another holder may have come and gone since, so that taking them again would
// not do.
func (u *unit) stillLocked(ctx context.Context, before string, err error) error {
	now, askErr := u.rolledBack(ctx)
	switch {
	case err != nil && u.l.Info().EndsTransaction(err):
		return err
	case askErr != nil:
		return askErr
	case now != before:
		return lockerr.With(lockerr.ErrLost, errors.New("the transaction has gone back to a savepoint that is older than the lock, which frees the lock; take the lock before the savepoint, or begin the transaction with the lock context"))
	}
	return err
}
