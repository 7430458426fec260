package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/pool"
)

// A transaction under one lease costs no round trip more than one without: one statement
// takes the lease and begins the transaction, another one checks the lease, releases it
// and commits. Both run on the transaction's connection, which carries the wake-up lock
// meanwhile. The grant is committed by itself, before the transaction begins; the release
// is a part of the transaction.
//
// It is for a key that is free. A caller that has to wait, or that others of its process
// wait behind from the beginning, takes the lease on a lock connection, from where it can
// be handed over.

// beginsWith returns the transaction that the attempt is to begin with the lease; nil if
// it begins apart.
func (a *attempt) beginsWith() *strategy.Beginning {
	b := a.r.Begin
	a.r.Begin = nil // it is tried once
	switch {
	case b == nil, !a.First, a.r.MinHold > 0, !a.begins(), a.cfg.Info.Router, a.cfg.Info.Topology != "", sabotage.SlowFence.Load():
		return nil
	}
	if _, ok := schema.Levels[b.Options.Isolation]; !ok {
		return nil
	}
	return b
}

// begins reports whether a transaction can begin with its lease, and end with it.
func (l *Locker) begins() bool {
	return l.cfg.Procedures.Has(l.cfg.Table.TakeProcedure(), l.cfg.Table.GiveProcedure())
}

// tryBegin asks once for the lease, and for the transaction with it. What does not come
// off is tried on a lock connection, which also tells why.
func (a *attempt) tryBegin(ctx context.Context, b *strategy.Beginning) (s *Lease, err error) {
	ours := false
	unused := b.Use(ctx, func(c *pool.Conn) (left strategy.State) {
		s, ours, left, err = a.beginOn(ctx, c, b.Options)
		return left
	})
	switch {
	case unused != nil:
		return nil, unused
	case s != nil, !ours, ctx.Err() != nil && err != nil:
		return s, err
	case errors.Is(err, driver.ErrBadConn): // nothing was sent
		a.Broke = true
		return nil, err
	case err == nil && a.left > 0:
		return nil, nil
	}
	return a.try(ctx, a.Wait > 0)
}

// beginOn is tryBegin on c, whose turn is the caller's. If ours is false, somebody else takes
// care of what may have been granted.
func (a *attempt) beginOn(ctx context.Context, c *pool.Conn, opts driver.TxOptions) (s *Lease, ours bool, left strategy.State, err error) {
	if err := c.Identify(ctx); err != nil { // nobody could end a statement on it
		return nil, true, strategy.Vacant, err
	}
	h := &lockConn{c: c, begins: true}
	s, ours, err = a.request(ctx, h, func(own context.Context) (answer, error) {
		return h.askBegin(own, a.beginBlock(opts))
	})
	switch {
	case s != nil:
		left = strategy.Begun
	case ours && err == nil:
		left = strategy.Vacant
	case ours && server.Number(err) != 0:
		if server.Missing(err) || server.Denied(err) {
			a.cfg.Procedures.Set(a.cfg.Table.TakeProcedure(), false)
		}
		left = strategy.Abandoned(ctx, c, background)
	}
	return s, ours, left, err
}

// askBegin runs a statement that may take a lease and begin a transaction.
func (h *lockConn) askBegin(ctx context.Context, block pool.Block) (answer, error) {
	a := answer{sent: time.Now()}
	rows, err := h.c.QueryBlock(ctx, block)
	if h.noted(err); err != nil {
		return a, err
	}
	if len(rows) != 1 || len(rows[0]) != 2 {
		return a, errors.New("the server does not say whether it has granted the lease")
	}
	a.token, a.left, err = tokenAndLeft(rows[0][0], rows[0][1])
	return a, err
}

// beginBlock takes the lease if it is free, and then begins the caller's transaction.
func (a *attempt) beginBlock(opts driver.TxOptions) pool.Block {
	text := a.texts.begin
	if opts != (driver.TxOptions{}) {
		text = a.beginText(opts)
	}
	turn, poller := a.precedence(a.r.Key, a.Wait > 0, a.yields())
	return a.block(text, schema.Hex(a.r.Key), a.ttl.Microseconds(), lockname.OfWakeUp(a.cfg.Namespace, a.r.Key), turn, poller)
}

// beginText is the text of beginBlock. See [schema.Table.TakeProcedure]; MariaDB runs the same
// as an anonymous block.
func (l *Locker) beginText(opts driver.TxOptions) string {
	if !l.cfg.Info.Blocks {
		return fmt.Sprintf("CALL %s(%s, %s, %s, ?, ?, ?, NULLIF(?, '"+nobody+"'), %d, %t) /* lease and BEGIN */",
			l.cfg.Table.TakeProcedure(), schema.Literal(l.cfg.Namespace), schema.Unhex, schema.Literal(l.owner), opts.Isolation, opts.ReadOnly)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "BEGIN NOT ATOMIC START TRANSACTION READ WRITE; SET @mysqllock_name = %[1]s, @mysqllock_ttl = ?, @mysqllock_wake = "+lockname.Value+", @mysqllock_turn = ?, @mysqllock_poller = "+lockname.Value+","+
		" @mysqllock_token = 0, @mysqllock_left = NULL, @mysqllock_began = NOW(6); "+
		"SELECT token, %[2]s INTO @mysqllock_next, @mysqllock_left FROM %[3]s WHERE namespace = %[4]s AND name = @mysqllock_name FOR UPDATE SKIP LOCKED; "+
		"IF @mysqllock_left = 0 AND NOW(6) <> @mysqllock_began AND (@mysqllock_poller = '"+nobody+"' OR IS_FREE_LOCK(@mysqllock_poller)) THEN "+
		"IF %[5]s >= @mysqllock_turn THEN INSERT INTO %[3]s (namespace, name) VALUES (%[4]s, @mysqllock_name)"+
		" ON DUPLICATE KEY UPDATE token = token + 1, owner = %[6]s, expires = UTC_TIMESTAMP(6) + INTERVAL @mysqllock_ttl MICROSECOND; "+
		"SET @mysqllock_token = @mysqllock_next + 1; END IF; END IF; IF @mysqllock_token = 0 THEN ROLLBACK; ELSE COMMIT; ",
		schema.Unhex, schema.Remaining(""), l.cfg.Table, schema.Literal(l.cfg.Namespace), wakeUp("@mysqllock_wake", "0"), schema.Literal(l.owner))
	if level := schema.Levels[opts.Isolation]; level != "" {
		b.WriteString("SET TRANSACTION ISOLATION LEVEL " + level + "; ")
	}
	b.WriteString("START TRANSACTION")
	if opts.ReadOnly {
		b.WriteString(" READ ONLY")
	}
	b.WriteString("; END IF; SELECT @mysqllock_token, COALESCE(@mysqllock_left, 0); END")
	return b.String()
}

// Detach takes the lease's wake-up lock off the connection of the transaction that was
// begun with it. The caller has the turn of that connection. After an error the connection
// must not be used any more.
func (s *Lease) Detach() error {
	c := s.txConn
	if s.txConn = nil; c == nil || !c.Clean() {
		return nil
	}
	ctx, cancel := context.WithTimeout(about(context.Background(), purpose.Release, s), background)
	defer cancel()
	return server.Exec(ctx, c.Conn, s.l.releaseWakeUpsSQL(s.key))
}

// CommitAndRelease is Commit that releases the lease, which was taken with the
// transaction's BEGIN on c. After done Release has nothing left to do; if the
// outcome is unknown, it releases the lease where the commit has not.
func (l *Locker) CommitAndRelease(ctx context.Context, c *pool.Conn, s *Lease) (done, unknown bool, err error) {
	ctx = about(ctx, purpose.Fence, s)
	s.mu.Lock()
	s.ending = true
	s.mu.Unlock()
	outcome, err := l.commit(ctx, c, []*Lease{s}, l.cfg.Table.GiveProcedure(), func(left time.Duration, mark string) pool.Block {
		return s.giveBlock(left, mark)
	})
	if outcome == server.Committed { // and the wake-up lock is released
		s.txConn = nil
	}
	done, unknown = outcome.Done(), outcome == server.Unknown
	s.mu.Lock()
	s.given, s.maybe = done, unknown
	s.ending = s.given || s.maybe
	s.mu.Unlock()
	if !done && err == nil || unwritable(err) {
		return l.Commit(ctx, c, []*Lease{s})
	}
	return done, unknown, err
}

// unwritable reports that the server refuses to write in the transaction, which goes on:
// it is read-only, or its isolation level does not go with binlog_format=STATEMENT.
func unwritable(err error) bool {
	n := server.Number(err)
	return n == 1792 || n == 1665
}

// giveBlock releases the lease and commits if the lease is held.
func (s *Lease) giveBlock(bound time.Duration, mark string) pool.Block {
	wake, token := lockname.OfWakeUp(s.l.cfg.Namespace, s.key), int64(s.token) //nolint:gosec // tokens are counted by one
	if !s.l.cfg.Info.Blocks {
		return s.l.block(s.l.texts.give, schema.Hex(s.key), token, wake, mark)
	}
	seconds, whole := bounds(bound)
	return s.l.block(s.l.texts.give, schema.Hex(s.key), token, seconds, whole, mark, wake)
}

// giveText is the text of giveBlock. See [schema.Table.GiveProcedure]. MariaDB bounds the wait
// of an UPDATE, so that one statement checks and releases; it counts a row with and without the
// DSN's clientFoundRows. SYSDATE is the time after that wait; on a replica that runs the statement
// again it would be another time, but with such a log there are no leases.
func (l *Locker) giveText() string {
	if !l.cfg.Info.Blocks {
		return fmt.Sprintf("CALL %s(%s, %s, ?, %s, ?, ?) /* fence, release and COMMIT */",
			l.cfg.Table.GiveProcedure(), schema.Literal(l.cfg.Namespace), schema.Unhex, schema.Literal(l.owner))
	}
	return "BEGIN NOT ATOMIC SET @mysqllock_name = " + schema.Unhex + ", @mysqllock_token = ?, @mysqllock_bound = ?, @mysqllock_row_wait = ?; " +
		l.within("@mysqllock_bound", "@mysqllock_row_wait", fmt.Sprintf("UPDATE %s SET %s WHERE namespace = %s AND name = @mysqllock_name AND token = @mysqllock_token AND owner = %s AND %s; ",
			l.cfg.Table, schema.Released, schema.Literal(l.cfg.Namespace), schema.Literal(l.owner), schema.Lasts(""))) +
		"IF ROW_COUNT() = 1 THEN COMMIT; SET @mysqllock_done = ?; DO RELEASE_LOCK(" + lockname.Value + "); ELSE SELECT 0; END IF; END"
}

// loseFound is lose for a renewal that has not found the lease, which runs within l.running.
func (s *Lease) loseFound() {
	s.mu.Lock()
	ending := s.ending
	s.mu.Unlock()
	if ending { // the commit has released it
		return
	}
	why := &notOurs{other: errNotOurs}
	s.lose(why)
	s.l.running.Go(func() { why.ask(s) })
}

// notOurs is why a lease is lost: other, or that somebody has taken it away by force, once that is
// known. No loss waits for it.
type notOurs struct {
	other  error
	forced atomic.Pointer[schema.Forced]
}

func (e *notOurs) Error() string {
	if f := e.forced.Load(); f != nil {
		return fmt.Sprintf("it was taken away on %v", f)
	}
	return e.other.Error()
}

func (e *notOurs) Unwrap() error { return e.other }

// whyNotOurs is a notOurs that has asked, for a caller that waits.
func (s *Lease) whyNotOurs() error {
	why := &notOurs{other: errNotOurs}
	why.ask(s)
	return why
}

// ask asks the server who has taken the lease away by force. It does not wait for long.
func (e *notOurs) ask(s *Lease) {
	l := s.l
	if l.untold.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(l.running.Ctx, askWhy)
	defer cancel()
	c, err := l.cfg.Control.Acquire(ctx)
	if err != nil {
		return
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, "SELECT released FROM "+l.cfg.Table.String()+" WHERE "+l.row("", s.key))
	if err != nil || len(rows) == 0 {
		return
	}
	if f, ok := schema.ReadForced(rows[0][0]); ok && f.Token == s.token {
		e.forced.Store(&f)
	}
}

// askWhy is how long whoever asks for a Forced waits.
const askWhy = time.Second

// released reports what the commit has released: given is sure, maybe is that nobody knows.
func (s *Lease) released() (given, maybe bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.given, s.maybe
}
