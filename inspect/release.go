package inspect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// ErrChanged: the lock is not held any more by those who had it in the snapshot.
// Nothing was done.
var ErrChanged = errors.New("mysqllock: not held any more as it was seen")

// Released is what was done to break a lock.
type Released struct {
	Token  uint64   // of the lease, now: with its old one nobody commits any more
	Killed []uint64 // connections that were ended
}

// Release breaks a lock that Snapshot has shown, if those who held it do still.
//
// A lease is taken from its holder in one statement, which raises the token: the
// fence keeps what the holder has not committed from being committed. Those who
// wait look within five seconds. It needs INSERT and UPDATE on the lock table.
//
// A row lock or an advisory lock is taken by ending its holder's connection, at
// once or when the statement on it notices: a transaction is rolled back, and all
// of the [Holder.Locks] go with it. Connections of other accounts can be ended with
// CONNECTION_ADMIN, on MariaDB CONNECTION ADMIN. Who holds it is asked right before,
// on the same connection, so that nobody is hit who has been given the same
// connection id, but one who has just given the lock back can be.
func (i *Inspector) Release(ctx context.Context, lock Lock) (*Released, error) {
	out := new(Released)
	err := i.on(ctx, func(ctx context.Context, s *session) (err error) {
		switch lock.Strategy {
		case lease:
			out.Token, err = s.takeLease(ctx, lock)
		case row, advisory:
			out.Killed, err = s.killHolders(ctx, lock)
		default:
			err = ErrChanged
		}
		return err
	})
	if err != nil {
		return out, &lockerr.Error{Op: "release", Key: lock.Key, Strategy: lock.Strategy, Err: err}
	}
	return out, nil
}

const (
	patience = 3 * time.Second // with who has locked the lease's row, to commit under it for one
	pace     = 50 * time.Millisecond
)

// takeLease ends the lease whose token the lock has.
func (s *session) takeLease(ctx context.Context, lock Lock) (token uint64, err error) {
	// An UPDATE has no NOWAIT; the insert always meets the row that it has read.
	text := fmt.Sprintf("INSERT INTO %[1]s (namespace, name, owner, token, expires)"+
		" SELECT r.namespace, r.name, r.owner, r.token, r.expires FROM %[1]s r"+
		" WHERE r.namespace = %[2]s AND r.name = %[3]s AND r.token = %[4]d AND %[5]s FOR UPDATE NOWAIT"+
		" ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID(r.token + 1), owner = NULL, expires = LEAST(r.expires, UTC_TIMESTAMP(6))",
		s.table, schema.Literal(lock.Namespace), schema.Literal(lock.Name), lock.Token, schema.Live("r."))
	for deadline := time.Now().Add(patience); ; {
		result, err := s.conn.ExecContext(ctx, text)
		if err == nil {
			raised, err := result.LastInsertId()
			if err == nil && raised == 0 {
				err = ErrChanged
			}
			return uint64(raised), err
		}
		if !server.Locked(err) && !server.Deadlock(err) {
			return 0, err
		}
		if time.Now().After(deadline) {
			return 0, lockerr.With(lockerr.ErrLocked, fmt.Errorf("somebody has locked the lease's row: %w", err))
		}
		select {
		case <-time.After(pace):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// killHolders ends the connections that hold the lock, now and in the snapshot.
func (s *session) killHolders(ctx context.Context, lock Lock) (killed []uint64, err error) {
	p := s.picture(Filter{})
	if lock.Strategy == row {
		read := p.mysqlRowLocks
		if s.mariadb {
			read = p.mariadbRowLocks
		}
		err = read(ctx)
	} else {
		err = p.askWhoHas(ctx, lock.Name)
	}
	if err == nil {
		err = p.readClients(ctx)
	}
	if err != nil {
		return nil, err
	}
	now := Lock{Strategy: lock.Strategy}
	name := id{lock.Strategy, lock.Namespace, lock.Name}
	if lock.Strategy == advisory {
		name.namespace = ""
	}
	now.fill(p.claims[name], p.clients, nil)
	for _, h := range now.Holders {
		seen := slices.ContainsFunc(lock.Holders, func(other Holder) bool { return other.Client == h.Client })
		if !seen || h.ConnectionID == 0 {
			continue
		}
		_, err := s.conn.ExecContext(ctx, "KILL CONNECTION "+strconv.FormatUint(h.ConnectionID, 10))
		const noSuchThread, notOurs = 1094, 1095
		switch server.Number(err) {
		case noSuchThread: // it has ended by itself
			continue
		case notOurs:
			privilege := "CONNECTION_ADMIN"
			if s.mariadb {
				privilege = "CONNECTION ADMIN"
			}
			err = fmt.Errorf("%w; %s", err, s.grant(privilege, "*.*"))
		}
		if err != nil {
			return killed, err
		}
		killed = append(killed, h.ConnectionID)
	}
	if len(killed) == 0 {
		return nil, ErrChanged
	}
	return killed, nil
}

// askWhoHas notes who has a named lock.
func (p *picture) askWhoHas(ctx context.Context, name string) error {
	if !ourName.MatchString(name) {
		return fmt.Errorf("%q is the name of no advisory lock", name)
	}
	rows, err := p.query(ctx, "SELECT IS_USED_LOCK('"+name+"')")
	if err != nil {
		return err
	}
	if conn, _ := strconv.ParseUint(rows[0][0], 10, 64); conn != 0 {
		p.named(name, claim{conn: conn})
	}
	return nil
}
