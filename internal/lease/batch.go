package lease

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Requests gather while all lock connections are busy; so do releases of leases whose wake-up locks are on the same
// connection. Requests also gather right after a batch, whose callers were answered at the same moment, and may all be
// about to ask again. The caller that gets the next connection sends all that have gathered, in a batch.

// sharedConns is how many lock connections with room for wake-up locks there are before requests share them. On more
// connections the server would commit each request alone; of two, one gathers requests while the other one commits.
// Further connections are opened behind a statement that takes longer than sharedFor, since it may wait for a row.
//
// Most of the cost of a batch does not depend on how many rows it changes: on MySQL 9.7 a batch takes 0.9 ms, and 0.03 ms
// more for a lease that is taken and one that is released. So with more lock connections the batches are smaller.
const (
	sharedConns = 2
	sharedFor   = 50 * time.Millisecond
)

// maxShared is how many requests share a batch, and how many releases. Their rows are locked while the batch runs, and
// their callers wait for each other.
const maxShared = 100

// shares reports whether there may be batches. A batch locks the rows that it changes by SKIP LOCKED, and takes wake-up
// locks. The nodes of a cluster may refuse its COMMIT, and a proxy may change the connection between two statements.
func (l *Locker) shares() bool { return l.grantsOnSessions() && !l.cfg.Info.Router }

// take is a request that is sent together with others.
type take struct {
	attempt *attempt
	ticket  *queue.Ticket
	inTurn  bool

	// What has become of it, once done is closed.
	outcome
	alone bool      // the request is to be sent alone: on lc, whose turn it has, or on any connection if lc is nil
	lease *Grant    // the granted lease
	lc    *lockConn // if not alone: the connection on which the lease may have been granted
}

// connOrShare returns a lock connection on which to send a request, with its turn. If all are busy, connOrShare sends the
// request together with others; then the connection is nil.
func (a *attempt) connOrShare(ctx context.Context, inTurn bool) (lc *lockConn, g *Grant, err error) {
	lc, opens := a.l.freeConn()
	switch {
	case opens:
		defer a.l.opened()
	case lc != nil && lc.c.Fresh(ctx):
		return lc, nil, nil
	case lc != nil:
		a.l.drop(lc)
	case a.l.shares():
		t := &take{attempt: a, ticket: a.Ticket, inTurn: inTurn, outcome: outcome{done: make(chan struct{})}}
		g, alone, err := a.tryShared(ctx, t)
		switch {
		case !alone:
			return nil, g, err
		case t.lc != nil:
			return t.lc, nil, nil
		}
	}
	lc, err = a.l.borrow(ctx)
	return lc, nil, err
}

// short returns which bound leaves callers no connection to ask on; nil for none.
func (l *Locker) short() error {
	l.mu.Lock()
	asks := len(l.lockConns) > 0
	l.mu.Unlock()
	if asks {
		return nil
	}
	return l.cfg.Conns.Exhausted()
}

// freeConn returns a free lock connection, with its turn. If there is none, opens says that the request is to open one
// for itself, and to call opened then. Else the request gathers: there are enough connections, or will be soon; or other
// requests gather, or may do so soon.
func (l *Locker) freeConn() (free *lockConn, opens bool) {
	if l.takes.ShouldJoin() {
		return nil, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	free, waited, more := l.pick(min(sharedConns, l.maxLockConns) - l.opening)
	if opens = free == nil && more && (waited == nil || l.cfg.Conns.Ready()); opens {
		l.opening++
	}
	return free, opens
}

func (l *Locker) opened() {
	l.mu.Lock()
	l.opening--
	l.mu.Unlock()
}

// tryShared is try for a request that is sent together with others. alone says that it is to be sent alone: then the
// request has the turn of t.lc, unless that is nil.
func (a *attempt) tryShared(ctx context.Context, t *take) (g *Grant, alone bool, err error) {
	if a.l.takes.Join(t) {
		a.l.running.Go(a.l.leadTakes)
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		if a.l.takes.Quit(t) {
			return nil, false, context.Cause(ctx)
		}
	}
	if !terms.Answered(ctx, t.done) {
		a.forgo(t)
		return nil, false, context.Cause(ctx)
	}
	if t.alone {
		return nil, true, nil
	}
	a.leaseLeft = t.leaseLeft
	switch {
	case t.lc != nil:
		return nil, false, a.unanswered(ctx, t.lc, &t.outcome)
	case t.err != nil:
		return nil, false, t.err
	case t.lease == nil:
		return nil, false, nil
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), strategy.ErrWaitOver):
		a.forgo(t)
		return nil, false, context.Cause(ctx)
	case t.late(a.ttl):
		a.forgo(t)
		return nil, false, errLate
	}
	return t.lease, false, nil
}

// forgo gives back, in the background, the lease that t may still be granted, and for which no caller waits.
func (a *attempt) forgo(t *take) {
	a.Ticket = nil
	a.l.running.Go(func() {
		<-t.done
		switch {
		case t.alone && t.lc != nil:
			a.l.giveBack(t.lc)
		case t.lease != nil:
			t.lease.end(lockerr.ErrClosed)
			_ = a.l.relinquish(t.lease, t.ticket, false) // which goes on in the background
			return
		case t.lc != nil:
			a.freeUnknown(t.lc, false)
		}
		t.ticket.Leave()
	})
}

// leadTakes sends the requests that have gathered, on the next lock connection, together with the releases that have
// gathered for that connection.
func (l *Locker) leadTakes() {
	for more := true; more; {
		lc, err := l.borrowShared(l.running.Ctx)
		runtime.Gosched() // callers that the last batch has answered may be about to ask again
		var takes []*take
		takes, more = l.takes.Depart(maxShared)
		if err == nil {
			l.sendBatch(lc, takes, lc.releases.Along(maxShared))
			continue
		}
		for _, t := range takes {
			t.alone = true
			close(t.done)
		}
	}
}

// borrowShared is borrow for requests that go on gathering until they have the connection.
func (l *Locker) borrowShared(ctx context.Context) (*lockConn, error) {
	patient, cancel := server.Within(ctx, sharedFor)
	defer cancel()
	lc, err := l.borrowOf(patient, min(sharedConns, l.maxLockConns))
	if lc != nil || ctx.Err() != nil || patient.Err() == nil {
		return lc, err
	}
	return l.borrow(ctx)
}

// leaving is a release that is sent together with others.
type leaving struct {
	g    *Grant
	lc   *lockConn // the connection that has the wake-up lock
	done chan struct{}

	// What has become of it, once done is closed.
	alone bool // the release is to be sent alone
	found bool // the server still had the lease
	err   error
}

// releaseOnce releases a lease. found says that the server still had the lease, asked that the server was asked.
//
// The release is sent alone if the connection with the wake-up lock is lost, or if that is free and no other releases are
// to be expected; else together with all releases that wait for the connection. If the server takes no writes and
// elsewhere is set, the next try is sent on another connection: that may lead to the server that has replaced this one.
func (l *Locker) releaseOnce(ctx context.Context, g *Grant, elsewhere bool) (found, asked bool, err error) {
	lc, shared := l.shareRelease(g)
	if shared != nil {
		select {
		case <-shared.done:
		case <-ctx.Done():
			return false, !shared.lc.releases.Quit(shared), server.EndOf(ctx)
		}
		if !shared.alone {
			return shared.found, true, shared.err
		}
	}
	if lc != nil && !lc.c.Fresh(ctx) {
		l.drop(lc)
		lc = nil
	}
	if lc == nil {
		if lc, err = l.connOf(ctx, g); err != nil {
			return false, false, err
		}
	}
	defer l.giveBack(lc)
	if found, err = l.releaseOn(ctx, lc, g); elsewhere && server.Refused(err) {
		lc.c.Taint()
	}
	return found, true, err
}

// shareRelease returns one of three: the connection with the lease's wake-up lock, and its turn, if it is free and no
// other releases are to be expected; the release that goes together with others; or nothing.
func (l *Locker) shareRelease(g *Grant) (*lockConn, *leaving) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lc := g.conn
	switch {
	case lc == nil || lc.gone || g.minHold > 0 || !l.shares():
		return nil, nil
	case !lc.releases.ShouldJoin() && lc.c.TryTurn():
		return lc, nil
	}
	shared := &leaving{g: g, lc: lc, done: make(chan struct{})}
	if lc.releases.Join(shared) {
		l.running.Go(func() { l.leadReleases(lc) })
	}
	return nil, shared
}

// leadReleases sends the releases that have gathered for lc, together with the requests that have gathered meanwhile.
func (l *Locker) leadReleases(lc *lockConn) {
	for more := true; more; {
		ctx, cancel := server.Within(context.Background(), handoffWait)
		mine, _ := l.awaitTurn(ctx, lc)
		cancel()
		runtime.Gosched() // as in leadTakes
		var leaves []*leaving
		leaves, more = lc.releases.Depart(maxShared)
		if mine {
			l.sendBatch(lc, l.takesFor(lc), leaves)
			continue
		}
		for _, r := range leaves {
			r.alone = true
			close(r.done)
		}
	}
}

// takesFor returns the requests that have gathered, if lc has room for their wake-up locks.
func (l *Locker) takesFor(lc *lockConn) []*take {
	l.mu.Lock()
	roomy := l.hasRoom(lc)
	l.mu.Unlock()
	if !roomy {
		return nil
	}
	return l.takes.Along(maxShared)
}

// sendBatch takes and releases leases on lc, whose turn the caller has. Then it gives lc back, and answers the callers.
func (l *Locker) sendBatch(lc *lockConn, takes []*take, leaves []*leaving) {
	switch {
	case len(takes) == 1 && len(leaves) == 0:
		takes[0].alone, takes[0].lc = true, lc // the request has the turn now
		close(takes[0].done)
		return
	case len(takes) == 0 && len(leaves) == 1:
		only := leaves[0]
		only.found, only.err = l.releaseOn(about(context.Background(), purpose.Release, only.g), lc, only.g)
	case len(takes)+len(leaves) > 0:
		l.sendSeveral(lc, takes, leaves)
	}
	l.giveBack(lc)
	for _, t := range takes {
		close(t.done)
	}
	for _, r := range leaves {
		close(r.done)
	}
}

func (l *Locker) sendSeveral(lc *lockConn, takes []*take, leaves []*leaving) {
	ctx, cancel := server.Within(several(takes, leaves), background)
	defer cancel()
	maybe, err := l.changeRows(ctx, lc, takes, leaves)
	lost := err != nil && maybe
	switch {
	case lost:
		lc.c.Taint()
	case err != nil:
		l.rollBack(ctx, lc, takes)
	}
	for _, t := range takes {
		switch {
		case lost && t.token > 0:
			t.err, t.lc = err, lc
		case err != nil:
			t.alone = true // nothing was granted
		case t.token > 0:
			if t.lease, t.err = t.attempt.grant(lc, t.ticket, t.answer); t.err != nil && t.attempt.undo(lc, t.token) != nil {
				t.lc = lc
				lc.c.Taint()
			}
		}
	}
	for _, r := range leaves {
		switch {
		case lost && r.found:
			r.found, r.err = false, err
		case err != nil:
			r.found, r.alone = false, true // nothing was released
		}
	}
	if err == nil {
		l.forgetWakeUps(ctx, lc, leaves)
	}
}

// rollBack ends a batch that was refused, so that requests and releases that are sent alone meet nothing of it.
func (l *Locker) rollBack(ctx context.Context, lc *lockConn, takes []*take) {
	if !lc.c.Clean() {
		return
	}
	ctx, cancel := server.Within(context.WithoutCancel(ctx), background/2)
	defer cancel()
	if _, err := lc.exec(ctx, "ROLLBACK"); err != nil {
		lc.c.Taint()
	}
	var keys []string
	for _, t := range takes {
		keys = append(keys, t.attempt.r.Key)
	}
	l.releaseWakeUpsOn(ctx, lc, keys...)
}

// several returns the context of statements for takes and releases.
func several(takes []*take, leaves []*leaving) context.Context {
	var keys []string
	var asked purpose.Asked
	does := purpose.Release
	for _, t := range takes {
		keys, asked, does = append(keys, t.attempt.r.Key), append(asked, t.attempt.asked...), purpose.Take
	}
	for _, r := range leaves {
		keys, asked = append(keys, r.g.key), append(asked, r.g.asked...)
	}
	return purpose.Named(asked.In(context.Background()), does, hint.StrategyLease, keys...)
}

// changeRows takes and releases leases in one transaction. maybe: the transaction may be committed in spite of an error.
func (l *Locker) changeRows(ctx context.Context, lc *lockConn, takes []*take, leaves []*leaving) (maybe bool, err error) {
	answers, err := lc.send(ctx, "START TRANSACTION", l.lookSQL(takes, leaves))
	if err != nil {
		return false, err
	}
	granted, held, err := decide(takes, leaves, answers[1])
	if err != nil {
		return false, err
	}
	n := len(granted) + len(held)
	if n == 0 {
		_, err = lc.exec(ctx, "COMMIT")
		return false, err
	}
	sent := time.Now()
	maybe, err = lc.changeAndCommit(ctx, l.changeRowsSQL(granted, held), 2*n, l.cfg.Info)
	for _, t := range granted {
		t.token, t.sent = t.token+1, sent
	}
	return maybe, err
}

// changeAndCommit runs text, and commits if that has changed so many rows. maybe is as in changeRows. In one text a guard
// checks the number; if statements go one by one, that would cost a command more.
func (lc *lockConn) changeAndCommit(ctx context.Context, text string, rows int, info server.Info) (maybe bool, err error) {
	if lc.c.Packs() {
		answers, err := lc.send(ctx, text, info.Guard(fmt.Sprintf("ROW_COUNT() = %d", rows)), "COMMIT")
		return len(answers) >= 2 || unknown(err), err // what comes after COMMIT may have failed, too
	}
	result, err := lc.exec(ctx, text)
	if err != nil {
		return false, err
	}
	if changed, err := result.RowsAffected(); err != nil || changed != int64(rows) {
		return false, errors.Join(err, fmt.Errorf("%d rows of %d were changed", changed/2, rows/2))
	}
	_, err = lc.exec(ctx, "COMMIT")
	return unknown(err), err
}

// rowFree and rowOurs are what lookSQL says of the row of a request.
const (
	rowFree = "1" // the lease may be taken, but another connection has the wake-up lock
	rowOurs = "2" // the lease may be taken, and this connection has the wake-up lock
)

// decide notes what the server says of each row. It returns the requests that are granted, and the releases whose leases
// are held, no row twice. If the server says nothing of a row, the row was locked, or is missing.
func decide(takes []*take, leaves []*leaving, rows [][]string) (granted []*take, held []*leaving, err error) {
	said := make(map[string][]string, len(rows))
	for _, row := range rows {
		said[row[0]] = row
	}
	for _, t := range takes {
		row, ok := said[t.attempt.r.Key]
		if t.alone = !ok; t.alone {
			continue
		}
		token, left, err := tokenAndLeft(row[1], row[3])
		if err != nil {
			return nil, nil, err
		}
		found := row[4]
		t.leaseLeft = left
		if found == rowOurs || found == rowFree && !t.inTurn {
			t.token = token
			granted = append(granted, t)
			delete(said, t.attempt.r.Key)
		}
	}
	for _, r := range leaves {
		row, ok := said[r.g.key]
		r.alone = !ok
		if r.found = ok && row[1] == strconv.FormatUint(r.g.token, 10) && row[2] == "1"; r.found {
			held = append(held, r)
			delete(said, r.g.key)
		}
	}
	return granted, held, nil
}

// lookSQL locks those rows that nobody has locked. Its columns are the name, the token, whether the lease is ours, the
// microseconds left, and for a request whether it may be granted. To find that out, the connection takes the wake-up lock,
// if nobody has that. For a request for k, and a release of l:
//
//	SELECT name, token, owner <=> 'me',
//	  IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0),
//	  IF(name IN ('k') AND NOT (owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)),
//	    1 + IF(IS_USED_LOCK(CONCAT('mysqllock-lease-', LEFT(SHA2(CONCAT('app\0', name), 256), 40))) <=> CONNECTION_ID(), 1,
//	      COALESCE(GET_LOCK(CONCAT('mysqllock-lease-', LEFT(SHA2(CONCAT('app\0', name), 256), 40)), 0), 0)), 0)
//	FROM mysqllock FORCE INDEX (PRIMARY) WHERE namespace = 'app' AND name IN ('k', 'l') FOR UPDATE SKIP LOCKED
func (l *Locker) lookSQL(takes []*take, leaves []*leaving) string {
	var names []string
	for _, t := range takes {
		names = append(names, schema.Literal(t.attempt.r.Key))
	}
	asked := among(names, len(takes)+len(leaves))
	for _, r := range leaves {
		names = append(names, schema.Literal(r.g.key))
	}
	return "SELECT name, token, owner <=> " + schema.Literal(l.owner) + ", " + schema.Remaining("") + "," +
		" IF(" + asked + " AND NOT " + schema.Live("") + ", 1 + " + wakeUp(lockname.SQLOfWakeUp(l.cfg.Namespace, "name"), "0") + ", 0)" +
		" FROM " + l.cfg.Table.String() + " FORCE INDEX (PRIMARY)" +
		" WHERE namespace = " + schema.Literal(l.cfg.Namespace) + " AND name IN (" + strings.Join(names, ", ") + ") FOR UPDATE SKIP LOCKED"
}

// changeRowsSQL grants and releases leases whose rows are locked. Its INSERT always meets an existing row, by the
// primary key, and counts two rows for each. For a grant of k, and a release of l:
//
//	INSERT INTO mysqllock (namespace, name) VALUES ('app', 'k'), ('app', 'l') ON DUPLICATE KEY UPDATE
//	  token = token + (name IN ('k')),
//	  owner = IF(name IN ('k'), 'me',
//	    IF(RELEASE_LOCK(CONCAT('mysqllock-lease-', LEFT(SHA2(CONCAT('app\0', name), 256), 40))) IS NULL, NULL, NULL)),
//	  expires = IF(name IN ('k'), UTC_TIMESTAMP(6) + INTERVAL 30000000 MICROSECOND, LEAST(expires, UTC_TIMESTAMP(6)))
func (l *Locker) changeRowsSQL(granted []*take, held []*leaving) string {
	namespace := schema.Literal(l.cfg.Namespace)
	var rows, names, ttls []string
	for _, t := range granted {
		name := schema.Literal(t.attempt.r.Key)
		rows = append(rows, "("+namespace+", "+name+")")
		names, ttls = append(names, name), append(ttls, strconv.FormatInt(t.attempt.ttl.Microseconds(), 10))
	}
	for _, r := range held {
		rows = append(rows, "("+namespace+", "+schema.Literal(r.g.key)+")")
	}
	grants := among(names, len(rows))
	wakes := "RELEASE_LOCK(" + lockname.SQLOfWakeUp(l.cfg.Namespace, "name") + ")"
	return "INSERT INTO " + l.cfg.Table.String() + " (namespace, name) VALUES " + strings.Join(rows, ", ") + " ON DUPLICATE KEY UPDATE" +
		" token = token + (" + grants + ")," +
		" owner = IF(" + grants + ", " + schema.Literal(l.owner) + ", IF(" + wakes + " IS NULL, NULL, NULL))," +
		" expires = IF(" + grants + ", UTC_TIMESTAMP(6) + INTERVAL " + byName(names, ttls) + " MICROSECOND," +
		" LEAST(expires, UTC_TIMESTAMP(6)))"
}

// byName returns an expression that has, in a row with one of names, the value for that name; "0" without any.
//
//	ELT(FIELD(name, 'k', 'm'), 30000000, 5000000)
func byName(names, values []string) string {
	switch different := slices.Compact(slices.Clone(values)); len(different) {
	case 0:
		return "0"
	case 1:
		return values[0]
	}
	return fmt.Sprintf("ELT(FIELD(name, %s), %s)", strings.Join(names, ", "), strings.Join(values, ", "))
}

// among returns the condition that a row has one of names, out of many rows in all.
func among(names []string, many int) string {
	switch len(names) {
	case 0:
		return "FALSE"
	case many:
		return "TRUE"
	}
	return "name IN (" + strings.Join(names, ", ") + ")"
}

// forgetWakeUps notes that lc does not have the wake-up locks of released leases any more. It also gives back the wake-up
// locks of leases that were lost.
func (l *Locker) forgetWakeUps(ctx context.Context, lc *lockConn, some []*leaving) {
	var lost []string
	l.mu.Lock()
	for _, r := range some {
		if !r.alone && lc.wakeUps[r.g.key] == r.g {
			delete(lc.wakeUps, r.g.key)
			if !r.found {
				lost = append(lost, r.g.key)
			}
		}
	}
	l.mu.Unlock()
	if len(lost) > 0 {
		ctx, cancel := server.Within(context.WithoutCancel(ctx), background/2)
		defer cancel()
		l.releaseWakeUpsOn(ctx, lc, lost...)
	}
}
