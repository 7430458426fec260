package chaos

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Faults that random histories hardly ever meet. Each scenario arranges one, and the
// checks judge it: they find nothing where the driver is whole, and see what comes of it
// where the protection is left out.
var scenarios = []struct {
	name    string
	without string // the protections without which it goes wrong; "" where it only shows what happens
	run     func(*arena)
}{
	{"a reader beside the last COMMIT under a lapsed lease", "broken", readerBesideCommit},
	{"what frees an unanswered grant arrives when there is a later one", "broken", freedLate},
	{"the clock is set forward and back beneath a lease, and a row lock is granted between", "broken", clockForwardAndBack},
	{"the clock is set forward beneath a lease, and another is granted", "no fence", clockForward},
	{"the connection of an advisory lock is killed beneath a transaction, and another is granted", "no fence", advisoryKilled},
	{"the clock is set back beneath leases, of which one has lost its holder", "", clockBack},
}

// protections are what is left out of the driver.
var protections = []struct {
	name string
	out  []*atomic.Bool
}{
	{"broken", []*atomic.Bool{&sabotage.KeepLapsed, &sabotage.FreeAny}},
	{"no fence", []*atomic.Bool{&sabotage.NoFence}},
}

// TestScenarios has each scenario with the driver whole.
func TestScenarios(t *testing.T) {
	t.Parallel()
	onArenas(t, tempserver.EachFlavour(tempserver.RequireOwn(t)), func(t *testing.T, a *arena) { play(t, a, "") })
}

// TestScenariosWithoutProtection has each scenario without what protects from it: the checks see
// it, which does not depend on the server. Nothing else in this process uses the driver meanwhile.
func TestScenariosWithoutProtection(t *testing.T) {
	host := newArena(t, tempserver.RequireOwn(t)[0])
	for _, p := range protections {
		t.Run(p.name, func(t *testing.T) {
			for _, part := range p.out {
				part.Store(true)
				t.Cleanup(func() { part.Store(false) })
			}
			play(t, host, p.name)
		})
	}
}

// play has the scenarios that go wrong without some protections, or all if none is left out.
func play(t *testing.T, host *arena, without string) {
	for i, s := range scenarios {
		if without != "" && s.without != without {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			a := host.beside(t, fmt.Sprint("scenario", i))
			a.more = []string{"k", "l"}
			a.employ(nil)
			s.run(a)
			wrong, _ := a.judge(a.end())
			for _, v := range wrong {
				t.Log(v)
			}
			if (without != "") != (len(wrong) > 0) {
				t.Errorf("the checks find %d violations", len(wrong))
			}
		})
	}
}

// worker is one in this process, as of a client process with that name.
func (a *arena) worker(name, addr string, lockTTL time.Duration) (w *worker, end func()) {
	a.t.Helper()
	file, err := os.Create(filepath.Join(a.dir, name+".history"))
	a.must(err)
	db, err := sql.Open("mysqllock", fmt.Sprintf("root@tcp(%s)/%s?lockWait=5s&lockTTL=%v&lockOwner=%s", addr, a.database, lockTTL, name))
	a.must(err)
	c := &client{orders: orders{Name: name, Thinks: time.Millisecond}, file: file}
	_, err = db.ExecContext(lockctx.With(a.t.Context(), "own "+name, lockctx.Row()), "DO 0") // its row is there
	a.must(err)
	w = &worker{client: c, db: db, job: "scenario", thinks: time.Millisecond, appends: len(a.more) == 0, random: rand.New(rand.NewPCG(seed, 0))}
	return w, func() { db.Close(); file.Close() }
}

// commit commits a transfer under h, of which accounts are written, in the background.
func (t *transfer) commit(h *hold, tx *sql.Tx, accounts ...account) (ended chan struct{}) {
	ended = make(chan struct{})
	go func() {
		defer close(ended)
		call := t.attempt(accounts...)
		err := tx.Commit()
		if err == nil {
			h.say(kindUse, call, 0)
		}
		t.end(err, true)
	}()
	return ended
}

// readerBesideCommit: the server takes its time over a COMMIT, for longer than the lease
// lasts. A reader asks for the key all the while.
func readerBesideCommit(a *arena) {
	ctx, cancel := context.WithTimeout(a.t.Context(), patience)
	defer cancel()
	holder, end := a.worker("holder", a.addr(a.primary), ttl)
	defer end()
	reader, end := a.worker("reader", a.addr(a.primary), ttl)
	defer end()

	call := now()
	hold, err := mysqllock.Acquire(ctx, holder.db, "k", lease) // it goes on after the COMMIT, whose check locks the row shared
	a.must(err)
	defer hold.Release()
	tx, err := holder.db.BeginTx(hold.Context(), nil)
	a.must(err)
	h, t := holder.granted(call, 0, false, "k"), holder.transfer()
	state, err := t.read(ctx, tx, call, "k")
	a.must(err)
	state = t.moved(state)
	a.must(t.write(ctx, tx, state))
	locked := a.lockWrites()
	if locked == nil {
		a.t.Fatal("the server does not stop writes")
	}
	unlock := sync.OnceFunc(locked)
	defer unlock()
	committed := t.commit(h, tx, state)
	inTime := time.AfterFunc(2*ttl, unlock)
	defer inTime.Stop()
	for !reader.reads(ctx, func() { unlock(); <-committed }) {
		a.must(ctx.Err())
		time.Sleep(20 * time.Millisecond)
	}
}

// reads reads twice under a shared lock that joins a transaction, and reports whether it was
// granted.
func (w *worker) reads(ctx context.Context, between func()) (granted bool) {
	t, call := w.transfer(), now()
	ctx = w.own(ctx)
	tx, err := w.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err == nil {
		defer tx.Rollback()
		_, err = t.read(lockctx.With(ctx, "k", lockctx.Shared(), lockctx.NoWait()), tx, call, "k")
	}
	if granted = err == nil; granted {
		h := w.granted(call, 0, true, "k")
		between()
		call = now()
		if _, err = t.read(ctx, tx, call, "k"); err == nil {
			h.say(kindUse, call, 0)
		}
	}
	t.end(err, false)
	return granted
}

// own is a lock context of a key that nobody else uses: the keys of scenarios join its transaction. Its
// lock is shared, which is granted while the server stops writes.
func (w *worker) own(ctx context.Context) context.Context {
	return lockctx.With(ctx, "own "+w.orders.Name, lockctx.Row(), lockctx.Shared())
}

// writes is a transfer in a transaction that the key joins.
func (w *worker) writes(ctx context.Context, key string, opts ...lockctx.Option) (committed bool) {
	t, call := w.transfer(), now()
	ctx = w.own(ctx)
	tx, err := w.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		t.end(err, false)
		return false
	}
	defer tx.Rollback()
	state, err := t.read(lockctx.With(ctx, key, opts...), tx, call, key)
	if err == nil {
		h := w.granted(call, 0, false, key)
		state = t.moved(state)
		if err = t.write(ctx, tx, state); err == nil {
			<-t.commit(h, tx, state)
			return true
		}
	}
	t.end(err, false)
	return false
}

// held is a lock that a worker holds, with the transaction that it has under it.
type held struct {
	*hold
	lock  *mysqllock.Hold
	t     *transfer
	tx    *sql.Tx
	state account // to be committed
}

// acquire takes a lock for a worker of its own.
func (w *worker) acquire(ctx context.Context, key string, opts ...lockctx.Option) (*held, error) {
	call := now()
	lock, err := mysqllock.Acquire(ctx, w.db, key, opts...)
	if err != nil {
		return nil, err
	}
	own := *w
	own.random = rand.New(rand.NewPCG(seed, uint64(w.ids.Add(1))))
	return &held{hold: own.granted(call, lock.Token(), false, key), lock: lock}, nil
}

// begin begins a transaction, and reads in it.
func (h *held) begin(ctx, statements context.Context) error {
	h.t = h.transfer()
	since := now()
	tx, err := h.db.BeginTx(ctx, nil)
	if err == nil {
		h.tx = tx
		h.state, err = h.t.read(statements, tx, since, h.keys[0])
		h.state = h.t.moved(h.state)
	}
	if err != nil {
		h.t.end(err, false)
	}
	return err
}

// write writes what begin has decided.
func (h *held) write(ctx context.Context) error {
	err := h.t.write(ctx, h.tx, h.state)
	if err != nil {
		h.t.end(err, false)
	}
	return err
}

func (h *held) commit() error {
	call := h.t.attempt(h.state)
	err := h.tx.Commit()
	if err == nil {
		h.say(kindUse, call, 0)
	}
	h.t.end(err, true)
	return err
}

// advisoryKilled: a lock's connection is killed while its holder thinks in a transaction on
// another. Somebody else is granted the lock, and writes, before the holder does.
func advisoryKilled(a *arena) {
	ctx, cancel := context.WithTimeout(a.t.Context(), patience)
	defer cancel()
	holder, end := a.worker("holder", a.addr(a.primary), time.Minute)
	defer end()
	other, end := a.worker("other", a.addr(a.primary), time.Minute)
	defer end()
	h, err := holder.acquire(ctx, "k", advisory)
	a.must(err)
	defer h.lock.Rollback()
	inside := context.WithoutCancel(h.lock.Context())
	a.must(h.begin(inside, inside))
	defer h.tx.Rollback()
	var id int
	a.must(a.admin().QueryRowContext(ctx, "SELECT IS_USED_LOCK(?)", lockname.OfAdvisory(a.database, "k")).Scan(&id))
	a.must(a.exec(fmt.Sprint("KILL ", id)))
	for !other.writes(ctx, "k", advisory) {
		a.must(ctx.Err())
	}
	if h.write(context.Background()) == nil {
		_ = h.commit()
	}
}

// clockForward: the server's clock is set forward beneath a lease, so that somebody else is
// granted it, and writes.
func clockForward(a *arena) { a.stepClock(lockctx.Lease(time.Minute), 0) }

// clockForwardAndBack: somebody is granted a row lock while the clock is ahead, and writes.
// When it is set back the lease would be live again.
func clockForwardAndBack(a *arena) { a.stepClock(lockctx.Row(), -time.Hour) }

// stepClock sets the clock forward beneath a lease. Somebody else writes under a lock of
// the key, and the clock is set back. Then the holder commits what it has decided before.
func (a *arena) stepClock(lock lockctx.Option, back time.Duration) {
	ctx, cancel := context.WithTimeout(a.t.Context(), patience)
	defer cancel()
	holder, end := a.worker("holder", a.addr(a.primary), time.Minute) // it hears of nothing for 20 s
	defer end()
	other, end := a.worker("other", a.addr(a.primary), time.Minute)
	defer end()

	call := now()
	// With MinHold the lease is not taken by the BEGIN: it would be on the transaction's
	// connection, which who takes a lapsed lease from a silent holder closes.
	tx, err := holder.db.BeginTx(lockctx.With(ctx, "k", lockctx.Lease(time.Minute), lockctx.MinHold(time.Millisecond)), nil)
	a.must(err)
	defer tx.Rollback()
	h, t := holder.granted(call, 0, false, "k"), holder.transfer()
	state, err := t.read(ctx, tx, call, "k")
	a.must(err)
	state = t.moved(state)
	defer a.setClock(a.clock)
	a.setClock(a.clock + time.Hour)
	for !other.writes(ctx, "k", lock) {
		a.must(ctx.Err())
	}
	a.setClock(a.clock + back)
	a.must(t.write(ctx, tx, state))
	<-t.commit(h, tx, state)
	a.must(a.history.refresh())
	whole := !sabotage.KeepLapsed.Load() && !sabotage.NoFence.Load()
	for _, e := range a.history.events {
		if e.Kind == kindEnd && e.Op == t.id && e.Result != lost && whole {
			a.t.Errorf("the holder's commit: %s %s", e.Result, e.Error)
		}
	}
}

// clockBack: a lease whose holder is there lasts for a TTL again from its next renewal on.
// One whose holder is gone lasts until the clock shows its expiry, or somebody breaks it.
func clockBack(a *arena) {
	ctx, cancel := context.WithTimeout(a.t.Context(), patience)
	defer cancel()
	p := dbtest.StartProxy(a.t, a.addr(a.primary))
	defer p.Close()
	gone, end := a.worker("gone", p.Addr(), ttl)
	defer end()
	holder, end := a.worker("holder", a.addr(a.primary), ttl)
	defer end()
	left := func(key string) (d time.Duration) {
		a.must(a.admin().QueryRowContext(ctx, "SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires) * 1000 FROM "+a.database+
			".mysqllock WHERE namespace = ? AND name = ?", a.database, key).Scan(&d))
		return d
	}

	lost, err := mysqllock.Acquire(ctx, gone.db, "l", lease)
	a.must(err)
	held, err := mysqllock.Acquire(ctx, holder.db, "k", lease)
	a.must(err)
	p.Block(dbtest.Requests, dbtest.Answers)
	defer a.setClock(a.clock)
	a.setClock(a.clock - time.Hour)
	<-lost.Context().Done()
	for left("k") > ttl {
		a.must(ctx.Err())
		time.Sleep(20 * time.Millisecond)
	}
	if err := held.Release(); err != nil {
		a.t.Errorf("the holder that is there: %v", err)
	}
	_, err = mysqllock.Acquire(ctx, holder.db, "l", lease, lockctx.NoWait())
	if d := left("l"); !errors.Is(err, mysqllock.ErrLocked) || d < 59*time.Minute {
		a.t.Errorf("the lease without a holder: left %v, and another gets %v", d, err)
	}

	db, err := sql.Open("mysql", fmt.Sprintf("root@tcp(%s)/%s", a.addr(a.primary), a.database))
	a.must(err)
	defer db.Close()
	look, err := inspect.New(db, inspect.Options{})
	a.must(err)
	shown, err := look.Snapshot(ctx, inspect.Filter{Keys: []string{"l"}})
	a.must(err)
	for _, lock := range shown.Locks {
		_, err := look.Release(ctx, lock, "")
		a.must(err)
	}
	again, err := mysqllock.Acquire(ctx, holder.db, "l", lease)
	a.must(err)
	a.must(again.Release())
}

// freedLate: the answer to a grant is lost, and so, at first, is what frees it. That
// arrives when the same process has been granted the key again. Another process asks
// for the key all the while.
func freedLate(a *arena) {
	const long = 4 * ttl // the server ends a connection, with what is on its way, that is silent for so long
	ctx, cancel := context.WithTimeout(a.t.Context(), patience)
	defer cancel()
	p := dbtest.StartProxy(a.t, a.addr(a.primary))
	defer p.Close()
	holder, end := a.worker("holder", p.Addr(), long)
	defer end()
	other, end := a.worker("other", a.addr(a.primary), long)
	defer end()
	first, err := mysqllock.Acquire(ctx, holder.db, "k", lockctx.Lease(long)) // the row is there
	a.must(err)
	a.must(first.Release())

	for p.HeldUp() == 0 { // on a slow machine the connection may end before the server has granted it
		a.must(ctx.Err())
		p.LoseAnswer("LAST_INSERT_ID(")
		p.ArriveLate("LEAST(expires", 3*time.Second, 3100*time.Millisecond)
		if lost, err := mysqllock.Acquire(ctx, holder.db, "k", lockctx.Lease(long)); err == nil {
			a.must(lost.Release())
		}
		for until := time.Now().Add(time.Second); p.HeldUp() == 0 && time.Now().Before(until); {
			time.Sleep(10 * time.Millisecond)
		}
		p.Mend()
	}
	call := now()
	hold, err := mysqllock.Acquire(ctx, holder.db, "k", lockctx.Lease(long), lockctx.WaitForever()) // once it was freed, at the second try
	a.must(err)
	h := holder.granted(call, hold.Token(), false, "k")
	stop := h.believe(hold.Context())
	for until := time.Now().Add(2500 * time.Millisecond); time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
		call := now()
		stolen, err := mysqllock.Acquire(ctx, other.db, "k", lockctx.Lease(long), lockctx.NoWait())
		if err != nil {
			continue
		}
		h := other.granted(call, stolen.Token(), false, "k")
		time.Sleep(2 * noticeOfLease) // the first has notice of its loss, or not
		call = now()
		a.must(stolen.Release())
		h.say(kindRelease, call, 0)
		break
	}
	stop()
	call = now()
	if hold.Release() == nil {
		h.say(kindRelease, call, 0)
	}
}
