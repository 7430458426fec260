package inspect

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// ErrChanged says that the holders of the snapshot no longer hold the lock. Release has
// done nothing.
var ErrChanged = errors.New("mysqllock: the lock has changed hands since the snapshot; nothing was released")

// ErrNotKnown says that the server does not tell which connections hold the lock. Release
// has done nothing. The error's text names the connections that may, if these are known.
var ErrNotKnown = errors.New("mysqllock: the server does not tell which connection holds the lock; nothing was released")

// Released is what was done to break a lock.
type Released struct {
	Token  uint64   // the new token of the lease: with the old one nothing can be committed
	Killed []uint64 // connections that were ended
}

// Release breaks a lock of a Snapshot, if it still has the same holders.
//
// Release ends a lease by one statement that raises the token. The fence then refuses
// what its holder has not committed. Waiters notice within three seconds. This needs
// INSERT and UPDATE on the lock table.
//
// Release ends a row lock or an advisory lock by ending the connection of its holder. Its
// transaction is rolled back, and all of its [Holder.Locks] are released. To end the
// connections of other accounts you need CONNECTION_ADMIN, on MariaDB CONNECTION ADMIN.
// Release asks for the holder right before each KILL, so it does not end a connection that
// has got the same id since, or that does not hold the lock any more: the error says so. It can end
// one that releases the lock in that moment. On TiDB, which can crash by that, it releases leases
// only; the error for a row lock names the holder's connection, if that is known.
//
// The holder of a lease is told who has taken it away, that is the account, this process, the
// time and reason, in the text of its ErrLost, if the lock table has the columns for it (see
// [Inspector.MakeTable]); [Lock.Forced] has the same. reason may be "", and has 500 bytes at
// most. The holder of another lock is told only that its connection has ended.
//
// If the server shows no holder of a row lock, Release tries to lock the row, as [Filter.Try] does. It
// fails with [ErrNotKnown] if the row is locked, and by one of several connections; on MariaDB also if
// another program reads INNODB_TRX all the time, so that the server shows old holders.
func (i *Inspector) Release(ctx context.Context, lock Lock, reason string) (*Released, error) {
	out := new(Released)
	if len(reason) > schema.MaxReason {
		return out, fmt.Errorf("mysqllock: the reason has %d bytes, of at most %d", len(reason), schema.MaxReason)
	}
	err := i.on(ctx, func(ctx context.Context, s *session) (err error) {
		switch lock.Strategy {
		case lease:
			out.Token, err = s.revokeLease(ctx, lock, reason)
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
	revokeWait = 3 * time.Second // how long to wait if the lease's row is locked, for example by a COMMIT
	pace       = 50 * time.Millisecond
)

// revokeLease ends the lease, if its token is still that of lock.
func (s *session) revokeLease(ctx context.Context, lock Lock, reason string) (token uint64, err error) {
	held, known := lock.Token.Get()
	if !known {
		return 0, ErrChanged
	}
	// An UPDATE has no NOWAIT; the insert always meets the row that it has read.
	text := fmt.Sprintf("INSERT INTO %[1]s (namespace, name, owner, token, expires)"+
		" SELECT r.namespace, r.name, r.owner, r.token, r.expires FROM %[1]s r"+
		" WHERE r.namespace = %[2]s AND r.name = %[3]s AND r.token = %[4]d AND %[5]s FOR UPDATE NOWAIT"+
		" ON DUPLICATE KEY UPDATE token = r.token + 1, owner = NULL, expires = LEAST(r.expires, UTC_TIMESTAMP(6))",
		s.table, schema.Literal(lock.Namespace), schema.Literal(lock.Name), held, schema.Live("r."))
	note := ", " + schema.SetReleased(keyrow.OwnerOf(os.Args[0]), reason)
	for deadline := time.Now().Add(revokeWait); ; {
		result, err := s.change(ctx, text+note)
		if server.NoColumn(err) {
			note = ""
			continue
		}
		if err == nil {
			changed, err := result.RowsAffected()
			if err == nil && changed == 0 {
				err = ErrChanged
			}
			return held + 1, err
		}
		if !server.Locked(err) && !server.Deadlock(err) {
			return 0, err
		}
		if time.Now().After(deadline) {
			return 0, lockerr.With(lockerr.ErrLocked, fmt.Errorf("the lease's row is locked: %w", err))
		}
		select {
		case <-time.After(pace):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// change runs a statement that locks rows and changes them.
func (s *session) change(ctx context.Context, text string) (result sql.Result, err error) {
	if !s.info.Optimists {
		return s.exec(ctx, text)
	}
	if _, err := s.exec(ctx, "BEGIN PESSIMISTIC"); err != nil { // by itself it would lock none
		return nil, err
	}
	end := "COMMIT"
	if result, err = s.exec(ctx, text); err != nil {
		end = "ROLLBACK"
	}
	if _, failed := s.exec(ctx, end); err == nil {
		err = failed
	}
	return result, err
}

// killHolders ends the connections that hold the lock now, and held it in the snapshot.
func (s *session) killHolders(ctx context.Context, lock Lock) (killed []uint64, err error) {
	p, err := s.whoHas(ctx, lock)
	if err == nil {
		err = p.readClients(ctx)
	}
	if err != nil {
		return nil, err
	}
	now := Lock{Strategy: lock.Strategy}
	now.fill(p.claims[lock.id()], p.clients)
	p.complete(&now)
	unknown := false
	var left, others []uint64
	for _, h := range now.Holders.List {
		switch seen := slices.ContainsFunc(lock.Holders.List, func(other Holder) bool { return other.Client == h.Client }); {
		case h.ConnectionID == 0:
			unknown = true
			continue
		case !seen:
			others = append(others, h.ConnectionID)
			continue
		}
		if !s.info.Kills {
			return nil, s.notKilled(ctx, h.ConnectionID)
		}
		done, err := s.killHolder(ctx, lock, h.ConnectionID)
		if err != nil {
			return killed, err
		}
		if done {
			killed = append(killed, h.ConnectionID)
		} else {
			left = append(left, h.ConnectionID)
		}
	}
	switch {
	case len(killed) > 0 && len(others) > 0:
		return killed, fmt.Errorf("the connections %s have got the lock since the snapshot, and still hold it: look again;"+
			" the connections %s, which held it with them, were ended", list(others), list(killed))
	case len(killed) > 0:
		return killed, nil
	case len(left) > 0:
		return nil, fmt.Errorf("%w: the connections %s do not hold it any more", ErrChanged, list(left))
	case unknown || now.Holders.More && len(now.Holders.List) == 0:
		return nil, p.suspects(lock.id())
	}
	return nil, ErrChanged
}

// killHolder ends the connection if it still holds the lock. It asks for that last: until then the
// holder may have gone on to other work, and another have its connection's id.
func (s *session) killHolder(ctx context.Context, lock Lock, conn uint64) (done bool, err error) {
	p, err := s.whoHas(ctx, lock)
	if err != nil {
		return false, err
	}
	if !slices.ContainsFunc(p.claims[lock.id()], func(c claim) bool { return c.conn == conn && !c.waiting }) {
		return false, nil
	}
	_, err = s.exec(ctx, "KILL CONNECTION "+strconv.FormatUint(conn, 10))
	switch server.Number(err) {
	case server.NoSuchThread: // it has ended by itself
		return false, nil
	case server.KillDenied:
		err = fmt.Errorf("%w; %s", err, s.grant(s.view.mayKill, "*.*"))
	}
	return err == nil, err
}

// whoHas reads who has a row lock or an advisory lock.
func (s *session) whoHas(ctx context.Context, lock Lock) (p *picture, err error) {
	p = s.picture(Filter{})
	if lock.Strategy == advisory {
		return p, p.askWhoHas(ctx, lock.Name)
	}
	if s.view.refresh != nil {
		err = s.view.refresh(s, ctx)
	}
	if err == nil {
		err = p.view.rowLocks(p, ctx)
	}
	if err == nil {
		err = p.tryRow(ctx, lock.Namespace, lock.Name)
	}
	return p, err
}

// suspects is the error for a row that one of several connections has locked.
func (p *picture) suspects(lock id) error {
	conns := p.sharers[lock]
	if len(conns) == 0 {
		for _, t := range p.hiding {
			conns = append(conns, t.conn)
		}
	}
	if len(conns) == 0 {
		return ErrNotKnown
	}
	return fmt.Errorf("%w; it is held by one or more of the connections %s", ErrNotKnown, list(conns))
}

// askWhoHas notes the holder of a named lock.
func (p *picture) askWhoHas(ctx context.Context, name string) error {
	if !ourName.MatchString(name) {
		return fmt.Errorf("%q is not the name of an advisory lock", name)
	}
	rows, err := p.query(ctx, "SELECT IS_USED_LOCK("+lockname.Literal(name)+")")
	if err != nil {
		return err
	}
	if conn, _ := strconv.ParseUint(rows[0][0], 10, 64); conn != 0 {
		p.named(name, claim{conn: conn})
	}
	return nil
}
