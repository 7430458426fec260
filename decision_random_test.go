package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// decider is a caller that reads a counter and writes what it has read plus one, with
// whatever else it does in between. A write that the driver lets through and that did
// not count is a decision on stale data.
type decider struct {
	t     *testing.T
	db    *sql.DB
	on    beginner // db, or a sql.Conn of it
	r     *rand.Rand
	ctx   context.Context
	opts  []lockctx.Option
	seen  int // what the last read outside a transaction has shown, with what was written since; -1 without one
	log   []string
	wrote int // increments that are committed
}

func (d *decider) did(format string, args ...any) {
	d.log = append(d.log, fmt.Sprintf(format, args...))
}

type handle interface {
	querier
	dbtest.Execer
}

type beginner interface {
	handle
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}

// look reads the counter.
func (d *decider) look(ctx context.Context, q handle) (int, error) {
	n, err := read(ctx, q, 1)
	d.did("read %d, %v", n, err)
	return n, err
}

// write writes seen+1. It may be refused.
func (d *decider) write(ctx context.Context, q handle, seen int) error {
	_, err := q.ExecContext(ctx, setStock, seen+1)
	d.did("write %d, %v", seen+1, err)
	return err
}

// other is a statement that has nothing to do with the counter.
func (d *decider) other(ctx context.Context, q handle) (err error) {
	texts := []string{
		order, order, "UPDATE p SET stock = stock WHERE id = 1", "DELETE FROM orders WHERE id < 0",
		"INSERT INTO p (id, stock) VALUES (1, 1)", "SAVEPOINT a", "DO SLEEP(0)", "SELECT LAST_INSERT_ID()", "SELECT 1",
	}
	text := texts[d.r.IntN(len(texts))]
	if strings.HasPrefix(text, "SELECT") {
		var n int
		err = q.QueryRowContext(ctx, text).Scan(&n)
	} else {
		_, err = q.ExecContext(ctx, text)
	}
	d.did("%s, %v", text, err)
	if errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLost) {
		return err
	}
	return nil
}

// transaction does some of it in one.
func (d *decider) transaction() error {
	tx, err := d.on.BeginTx(d.ctx, nil)
	d.did("begin, %v", err)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	seen, wrote := d.seen, 0
	for range d.r.IntN(5) {
		switch d.r.IntN(3) {
		case 0:
			if seen, err = d.look(d.ctx, tx); err != nil {
				return err
			}
		case 1:
			if seen < 0 {
				continue
			}
			if err := d.write(d.ctx, tx, seen); err == nil {
				seen++
				wrote++
			} else if !errors.Is(err, mysqllock.ErrStaleRead) {
				return err
			}
		default:
			if err := d.other(d.ctx, tx); err != nil {
				return err
			}
		}
	}
	if d.r.IntN(3) == 0 {
		d.did("rollback")
		return tx.Rollback()
	}
	err = tx.Commit()
	d.did("commit, %v", err)
	if err == nil {
		if d.wrote += wrote; wrote > 0 && d.seen >= 0 {
			d.seen = seen
		}
	}
	return err
}

// unit does a few things in one lock context.
func (d *decider) unit() error {
	base, cancel := context.WithCancel(dbtest.Limited(d.t))
	defer cancel()
	d.ctx, d.seen, d.log = lockctx.With(base, "k", d.opts...), -1, nil
	d.on = d.db
	if d.r.IntN(3) == 0 {
		conn, err := d.db.Conn(base)
		if err != nil {
			return err
		}
		defer conn.Close()
		d.on = conn
		d.did("sql.Conn")
	}
	for range 2 + d.r.IntN(7) {
		var err error
		switch d.r.IntN(5) {
		case 0:
			d.seen, err = d.look(d.ctx, d.on)
		case 1, 2:
			if d.seen < 0 {
				continue
			}
			if err = d.write(d.ctx, d.on, d.seen); err == nil {
				d.seen++
				d.wrote++
			}
		case 3:
			err = d.other(d.ctx, d.on)
		default:
			err = d.transaction()
		}
		if err != nil && !errors.Is(err, mysqllock.ErrStaleRead) {
			return err
		}
	}
	return nil
}

// TestNoDecisionIsLost has many callers decide and write in any order.
func TestNoDecisionIsLost(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, _ func() context.Context) {
		name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
		if name == "shared" {
			return // keeps nobody out here
		}
		dbtest.Exec(t, s.plain, "UPDATE p SET stock = 0 WHERE id = 1")
		seed := rand.Uint64()
		var wg sync.WaitGroup
		var mu sync.Mutex
		wrote, refused := 0, 0
		for g := range 4 {
			wg.Go(func() {
				d := &decider{t: t, db: db, r: rand.New(rand.NewPCG(seed, uint64(g))), opts: keptAs()[name]}
				for range 40 {
					err := d.unit()
					if strings.Contains(strings.Join(d.log, "; "), "stale read") {
						mu.Lock()
						refused++
						mu.Unlock()
					}
					if err != nil && !errors.Is(err, mysqllock.ErrConflict) && !errors.Is(err, mysqllock.ErrDeadlock) {
						t.Errorf("seed %d: %v, after %s", seed, err, strings.Join(d.log, "; "))
						return
					}
				}
				mu.Lock()
				defer mu.Unlock()
				wrote += d.wrote
			})
		}
		wg.Wait()
		if n := s.stock(1); n != wrote || refused == 0 || wrote == 0 {
			t.Errorf("seed %d: the counter is %d after %d increments; %d units were refused something", seed, n, wrote, refused)
		}
	})
}
