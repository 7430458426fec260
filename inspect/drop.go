package inspect

import (
	"cmp"
	"context"
	"database/sql/driver"
	"fmt"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Dropped tells what [Inspector.DropTable] has dropped, and what it has left.
type Dropped struct {
	Table      string   // the quoted name of the table
	Procedures []string // quoted names: those that an earlier version has made, and that stay (see DropProcedures)
	Tables     []string // quoted names: other lock tables of the same database, which stay

	// Unseen says why advisory locks may be held that were not seen; "" if all were seen. They need
	// no table, so they stay held.
	Unseen string
}

// DropTable drops the lock table, with the tokens and versions of all keys. It does nothing, and the
// error matches lockerr.ErrLocked, while a lock is held or waited for: a row lock or a lease of any
// namespace in the table, or an advisory lock of one of these namespaces or of the Inspector's. An advisory lock whose
// name does not tell its namespace counts, too.
//
// Between the look at the leases and DROP TABLE the table is locked, so none is granted meanwhile.
// DropTable waits for up to a second for transactions that use the table, and new callers wait behind it. On a
// cluster it sees the row locks of one node only, and leases of all. A program with lockSchema=auto makes the
// table again at its next lock: with tokens from 1, or above all earlier ones if it has used the table before.
//
// It needs SELECT, LOCK TABLES and DROP, and MySQL or MariaDB.
func (i *Inspector) DropTable(ctx context.Context) (Dropped, error) {
	var done Dropped
	err := i.on(ctx, func(ctx context.Context, s *session) (err error) {
		done, err = s.dropTable(ctx)
		return err
	})
	if err != nil {
		return Dropped{}, fmt.Errorf("mysqllock: dropping the lock table: %w", err)
	}
	return done, nil
}

func (s *session) dropTable(ctx context.Context) (done Dropped, err error) {
	if !s.info.NamedLocks { // which has no LOCK TABLES that keeps others out, either
		return done, fmt.Errorf("the server is %s, on which nothing keeps a lock from being granted meanwhile;"+
			" when no program uses it, run:\nDROP TABLE %s", s.info.Engine, s.table)
	}
	p, err := s.look(ctx, Filter{AllNamespaces: true})
	if err != nil {
		return done, err
	}
	alike, err := s.lockTables(ctx)
	if err != nil {
		return done, err
	}
	if p.noTable {
		err := fmt.Errorf("there is no table %s", s.table)
		if len(alike) > 0 {
			err = fmt.Errorf("%w; lock tables of this database: %s", err, strings.Join(alike, ", "))
		}
		return done, err
	}
	used, err := s.used(ctx, p)
	switch {
	case err != nil:
		return done, err
	case len(used) > 0:
		return done, s.inUse(used)
	}
	done = Dropped{Table: s.table.String(), Unseen: p.unseenNames()}
	done.Tables = slices.DeleteFunc(alike, func(name string) bool { return strings.EqualFold(name, done.Table) })
	return done, s.onDriver(func(conn driver.Conn) error {
		if done.Procedures, err = s.table.OldProcedures(ctx, conn); err != nil {
			return err
		}
		return s.table.Drop(ctx, conn)
	})
}

// used returns the locks of the table that are held or waited for, and the advisory locks that are, or may be, of
// its namespaces.
func (s *session) used(ctx context.Context, p *picture) ([]Lock, error) {
	all, err := s.namespaces(ctx)
	if err != nil {
		return nil, err
	}
	locks, _ := p.locks()
	return slices.DeleteFunc(locks, func(l Lock) bool {
		return l.Strategy == advisory && l.Key != "" && l.Namespace != s.namespace &&
			!slices.ContainsFunc(all, func(n Namespace) bool { return n.Name == l.Namespace })
	}), nil
}

// inUse is the error for a table that has these locks in use.
func (s *session) inUse(locks []Lock) error {
	l, more := locks[0], ""
	what := l.Strategy + " lock"
	if l.Strategy == lease {
		what = lease
	}
	if l.Key != "" {
		what += fmt.Sprintf(" on %q of namespace %q", l.Key, l.Namespace)
	} else {
		what += fmt.Sprintf(" %q", l.Name)
	}
	if len(l.Holders.List) > 0 {
		what += " is held by " + l.Holders.List[0].name()
	} else {
		what += " is waited for by " + l.Waiters.List[0].name()
	}
	if n := len(locks) - 1; n > 0 {
		more = fmt.Sprintf(", and %d more are in use", n)
	}
	if l.Strategy == advisory && l.Key == "" {
		more += fmt.Sprintf("; its name does not tell the namespace: if it is another application's, run DROP TABLE %s yourself", s.table)
	}
	return lockerr.With(lockerr.ErrLocked, fmt.Errorf("the %s%s; mysqllock ls --all-namespaces shows all", what, more))
}

// name is the client's program, or else its account, and its connection.
func (c Client) name() string {
	name := cmp.Or(c.Program, c.User+"@"+c.Host)
	if c.ConnectionID != 0 {
		name += fmt.Sprintf(", connection %d", c.ConnectionID)
	}
	return name
}

// unseenNames says why advisory locks may be held that are not in the picture.
func (p *picture) unseenNames() string {
	for _, g := range p.gaps {
		if slices.Contains(g.holdersOf, advisory) {
			return g.Why
		}
	}
	return ""
}

// lockTables returns the quoted names of tables in the database of the lock table that look like one, at most ten.
func (s *session) lockTables(ctx context.Context) (names []string, err error) {
	rows, err := s.query(ctx, s.table.AlikeSQL())
	for _, r := range rows {
		names = append(names, s.table.Named(r[0]).String())
	}
	return names, err
}
