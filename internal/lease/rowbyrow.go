package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// steps are the steps in a lease's life that differ from server to server. Each step is called with the turn of its
// connection.
type steps struct {
	take           func(ctx context.Context, lc *lockConn, a *attempt, inTurn bool) (answer, error)
	release        func(ctx context.Context, lc *lockConn, key string, token uint64, minHold time.Duration) (found bool, err error)
	releaseSome    func(ctx context.Context, lc *lockConn, leases []*Grant) (passed []*Grant, err error) // passes over locked rows
	releaseUnknown func(ctx context.Context, lc *lockConn, key string) error
	extend         func(ctx context.Context, lc *lockConn, g *Grant, ttl time.Duration) (found bool, err error) // waits for the row
	extendSome     func(ctx context.Context, lc *lockConn, leases []*Grant, sent time.Time, ttl func(*Grant) time.Duration) error
}

// Without [server.Flavour].NamedLocks there are no wake-up locks, and waiters poll. On TiDB a statement by itself locks no row
// before its commit, so a lease is taken, renewed and released in a transaction that locks the row first. On these
// connections every statement begins a transaction. If a connection is lost, it is known what it was granted as soon as the
// row can be locked: the server keeps the row locked until the COMMIT of the grant has ended, well or badly.

// inTxn commits what f does on lc, if f says so, and else rolls it back.
func (lc *lockConn) inTxn(ctx context.Context, f func() (commit bool, err error)) error {
	commit, err := f()
	if commit && err == nil {
		if _, err = lc.exec(ctx, "COMMIT"); err != nil {
			lc.c.Taint()
			if server.Number(err) != 0 && !busy(err) { // the COMMIT may have come through, in spite of the server's number
				err = errors.New(err.Error())
			}
		}
		return err
	}
	if !lc.c.Clean() {
		return err
	}
	own, cancel := server.Within(context.WithoutCancel(ctx), background/2)
	defer cancel()
	if _, failed := lc.exec(own, "ROLLBACK"); failed != nil {
		lc.c.Taint()
		err = cmp.Or(err, failed)
	}
	return err
}

// takeRow is takeAndWake in a transaction of two statements, one after the other:
//
//	SELECT token, IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0)
//	FROM mysqllock WHERE namespace = 'app' AND name = 'k' FOR UPDATE NOWAIT;
//	UPDATE mysqllock SET token = token + 1, owner = 'me', expires = UTC_TIMESTAMP(6) + INTERVAL 30000000 MICROSECOND
//	WHERE namespace = 'app' AND name = 'k'
func (l *Locker) takeRow(ctx context.Context, lc *lockConn, asker *attempt, _ bool) (a answer, err error) {
	key := asker.r.Key
	a.sent = time.Now()
	err = lc.inTxn(ctx, func() (bool, error) {
		rows, err := lc.query(ctx, "SELECT token, "+schema.Remaining("")+" FROM "+l.cfg.Table.String()+" WHERE "+l.row("", key)+
			" FOR UPDATE NOWAIT")
		if err != nil {
			return false, err
		}
		if len(rows) == 0 {
			return false, keyrow.ErrNoRow
		}
		token, left, err := tokenAndLeft(rows[0][0], rows[0][1])
		if err != nil || left > 0 {
			a.leaseLeft = left
			return false, err
		}
		_, err = lc.exec(ctx, fmt.Sprintf("UPDATE %s SET token = token + 1, owner = %s, expires = %s WHERE %s",
			l.cfg.Table, schema.Literal(l.owner), in(asker.ttl), l.row("", key)))
		a.token = token + 1
		return true, err
	})
	if err != nil {
		a.token = 0
	}
	return a, err
}

// giveRow is giveAndWake in a transaction:
//
//	UPDATE mysqllock SET owner = NULL, expires = LEAST(expires, UTC_TIMESTAMP(6))
//	WHERE namespace = 'app' AND name = 'k' AND token = 7 AND owner = 'me'
//
// With a minHold of a second:
//
//	UPDATE mysqllock SET owner = 'me#00000000', expires = UTC_TIMESTAMP(6) + INTERVAL 1000000 MICROSECOND
//	WHERE namespace = 'app' AND name = 'k' AND token = 7 AND owner = 'me'
func (l *Locker) giveRow(ctx context.Context, lc *lockConn, key string, token uint64, minHold time.Duration) (found bool, err error) {
	set := schema.Released
	if minHold > 0 {
		set = "owner = " + schema.Literal(l.leftBy) + ", expires = " + in(minHold)
	}
	err = lc.inTxn(ctx, func() (bool, error) {
		result, err := lc.exec(ctx, fmt.Sprintf("UPDATE %s SET %s WHERE %s AND token = %d AND owner = %s",
			l.cfg.Table, set, l.row("", key), token, schema.Literal(l.owner)))
		if err != nil {
			return false, err
		}
		n, err := result.RowsAffected()
		found = n > 0
		return found, err
	})
	return found && err == nil, err
}

func (l *Locker) giveRows(ctx context.Context, lc *lockConn, leases []*Grant) (passed []*Grant, _ error) {
	return slices.DeleteFunc(slices.Clone(leases), func(g *Grant) bool {
		_, err := l.giveRow(ctx, lc, g.key, g.token, g.minHold)
		return err == nil
	}), nil
}

// giveUnknownRow is giveUnknownAndWake in a transaction of two statements, one after the other:
//
//	SELECT owner = 'me' FROM mysqllock WHERE namespace = 'app' AND name = 'k' FOR UPDATE;
//	UPDATE mysqllock SET owner = NULL, expires = LEAST(expires, UTC_TIMESTAMP(6)) WHERE namespace = 'app' AND name = 'k'
func (l *Locker) giveUnknownRow(ctx context.Context, lc *lockConn, key string) error {
	return lc.inTxn(ctx, func() (bool, error) {
		rows, err := lc.query(ctx, fmt.Sprintf("SELECT owner = %s FROM %s WHERE %s FOR UPDATE",
			schema.Literal(l.owner), l.cfg.Table, l.row("", key)))
		if err != nil || len(rows) == 0 || rows[0][0] != "1" {
			return false, err
		}
		_, err = lc.exec(ctx, fmt.Sprintf("UPDATE %s SET %s WHERE %s", l.cfg.Table, schema.Released, l.row("", key)))
		return true, err
	})
}

func (l *Locker) extendRow(ctx context.Context, lc *lockConn, g *Grant, ttl time.Duration) (found bool, err error) {
	err = lc.inTxn(ctx, func() (bool, error) {
		found, err = l.extend(ctx, lc, g, ttl)
		return found, err
	})
	return found && err == nil, err
}

// extendRows renews leases together. If somebody has locked one of the rows, each lease is renewed by itself; so it is on a
// server where an IN list would lock other rows, too.
func (l *Locker) extendRows(ctx context.Context, lc *lockConn, leases []*Grant, sent time.Time, ttl func(*Grant) time.Duration) error {
	together := len(leases)
	if l.cfg.Info.UnionLocks {
		together = 1
	}
	for some := range slices.Chunk(leases, together) {
		if err := l.extendTogether(ctx, lc, some, sent, ttl); err != nil {
			return err
		}
	}
	return nil
}

// extendTogether renews those of leases that the server still has, by changeSQL. It finds them so:
//
//	SELECT name, token FROM mysqllock WHERE namespace = 'app' AND name IN ('k', 'l') AND owner = 'me'
//	  AND expires > UTC_TIMESTAMP(6) FOR UPDATE NOWAIT
func (l *Locker) extendTogether(ctx context.Context, lc *lockConn, leases []*Grant, sent time.Time, ttl func(*Grant) time.Duration) error {
	var found []*Grant // the leases that are still ours
	err := lc.inTxn(ctx, func() (bool, error) {
		rows, err := lc.query(ctx, fmt.Sprintf("SELECT name, token FROM %s WHERE %s AND owner = %s"+
			" AND expires > UTC_TIMESTAMP(6) FOR UPDATE NOWAIT",
			l.cfg.Table, l.rowsOf(leases), schema.Literal(l.owner)))
		for _, g := range leases {
			if slices.ContainsFunc(rows, func(row []string) bool { return row[0] == g.key && row[1] == strconv.FormatUint(g.token, 10) }) {
				found = append(found, g)
			}
		}
		if err == nil && len(found) > 0 {
			_, err = l.extendOn(ctx, lc, found, ttl, "")
		}
		return len(found) > 0, err
	})
	for _, g := range leases {
		switch {
		case busy(err):
			l.queueUp(g)
		case err != nil:
			return err
		case slices.Contains(found, g):
			l.renewed(g, sent, ttl(g))
		default:
			g.loseFound()
		}
	}
	return nil
}

// rowsOf returns the condition for the rows of leases.
func (l *Locker) rowsOf(leases []*Grant) string {
	var names []string
	for _, g := range leases {
		names = append(names, g.key)
	}
	return schema.Rows(l.cfg.Namespace, names)
}
