//go:build unix

package matrix

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// refusals are ways that get no lock, with what the error says. Of what sends returns nothing reaches the server.
var refusals = []struct {
	name string
	says string
	run  func(ctx context.Context, u unit, sends func(func() error)) error
}{
	{"a transaction that began without the lock", "the transaction began without the lock; begin it with the lock context, or put mysqllock.Do around it", func(ctx context.Context, u unit, sends func(func() error)) error {
		tx, err := u.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		locked := u.lock(ctx)
		sends(func() error { return u.change(locked, tx) })
		sends(func() error { return u.add(locked, tx) })
		return tx.Rollback()
	}},
	{"one beside the unit of work of its lock context", "begin it with the lock context", func(ctx context.Context, u unit, sends func(func() error)) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		locked := u.lock(ctx)
		var n int
		if err := u.db.QueryRowContext(locked, read, u.id).Scan(&n); err != nil {
			return err
		}
		tx, err := u.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		sends(func() error { return u.add(locked, tx) })
		return errors.Join(tx.Rollback(), u.add(locked, u.db)) // which ends the unit, and nothing of it runs on beside the next refusal
	}},
	{"a sql.Conn that has set something", "SET sort_buffer_size", func(ctx context.Context, u unit, sends func(func() error)) error {
		conn, err := u.db.Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := conn.ExecContext(ctx, "SET SESSION sort_buffer_size = 300000"); err != nil {
			return err
		}
		sends(func() error { return u.change(u.lock(ctx), conn) })
		sends(func() error { return u.add(u.lock(ctx), conn) })
		sends(func() error {
			tx, err := conn.BeginTx(u.lock(ctx), nil)
			if err == nil {
				err = tx.Rollback()
			}
			return err
		})
		_, err = conn.ExecContext(ctx, "SET SESSION sort_buffer_size = DEFAULT")
		return errors.Join(err, u.add(u.lock(ctx), conn))
	}},
}

// TestRefusedWaysSendNothing: each strategy, on each kind of connection; the places take turns.
func TestRefusedWaysSendNothing(t *testing.T) {
	t.Parallel()
	all := places(t, tempserver.EachFlavour(tempserver.Require(t)))
	var cells []cell
	for s := range strategies {
		for k := range conns {
			cells = append(cells, cell{strategy: s, place: (s + k) % len(all), conns: k})
		}
	}
	each(t, cells, all, func(t *testing.T, c cell) {
		r := c.begin(t, all[c.place])
		u := r.unit
		u.db = r.mine
		for _, refusal := range refusals {
			dbtest.OK(t, refusal.run(dbtest.Limited(t), u, func(ask func() error) {
				var sent []string
				for range 25 { // what gives back the lock of an earlier unit may come in between
					since := r.tap.Texts()
					err := ask()
					var told *mysqllock.Error
					if !errors.Is(err, mysqllock.ErrUnsafe) || !errors.As(err, &told) || !strings.Contains(err.Error(), refusal.says) {
						t.Errorf("%s: %v", refusal.name, err)
					}
					if sent = slices.DeleteFunc(since(), func(text string) bool {
						return !strings.Contains(text, "counters") && !strings.Contains(text, "mysqllock")
					}); len(sent) == 0 {
						return
					}
				}
				t.Errorf("%s: it sent %q", refusal.name, sent)
			}))
		}
	})
}

// TestASQLConnSendsWhatASQLDBDoes: its read, decide, write runs on a session, too.
func TestASQLConnSendsWhatASQLDBDoes(t *testing.T) {
	t.Parallel()
	all := places(t, tempserver.EachFlavour(tempserver.Require(t)))
	at := slices.IndexFunc(ways, func(w way) bool { return w.name == "read-decide-write" })
	var cells []cell
	for s := range strategies {
		cells = append(cells, cell{strategy: s, way: at, place: s % len(all), conns: s % len(conns)})
	}
	each(t, cells, all, func(t *testing.T, c cell) {
		r := c.begin(t, all[c.place])
		u := r.unit
		u.db = r.mine
		want, got := readGolden(t, all[c.place].file)[c.use()], ""
		for range 25 { // what keeps a connection alive may come in between
			since := r.tap.Since()
			dbtest.OK(t, r.finish(func(ctx context.Context) error { return overConn(ctx, u) }))
			r.idle()
			if got = r.fold(since()); got == want {
				return
			}
		}
		t.Errorf("it sends\n%s\nand a sql.DB\n%s", got, want)
	})
}

// overConn reads, decides and writes over a sql.Conn.
func overConn(ctx context.Context, u unit) error {
	conn, err := u.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return u.change(u.lock(ctx), querier(conn))
}

var _ querier = (*sql.Conn)(nil)
