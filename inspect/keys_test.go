package inspect_test

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Keys are any bytes, and come back as they are. Names that do not tell their
// namespace would be shown to other tests.
func TestAKeyOfAnyBytesComesBack(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		db := s.process("root", "x'); DROP TABLE mysqllock; -- \\")
		i := s.inspector(s.root)
		keys := []string{"'", `\`, "';--", "a b", "%", "_", "` OR 1=1", "é", "\U0001F512", "a\nb", "a\xffb", "K", "k", strings.Repeat("k", 255), "x' FOR UPDATE /*"}
		for _, key := range keys {
			s.acquire(db, key, lockctx.Lease(30*time.Second))
			s.acquire(db, key, lockctx.Advisory())
		}
		snap := look(t, i, keys...)
		for _, key := range keys {
			l := find(snap, "lease", key)
			if l == nil || l.Namespace != s.Name || len(l.Holders.List) != 1 || l.Holders.List[0].Program != "x'); DROP TABLE mysqllock; -- \\" {
				t.Errorf("the lease on %q is %+v", key, l)
			}
			if l := find(snap, "advisory", key); l == nil || l.Namespace != s.Name || len(l.Holders.List) != 1 {
				t.Errorf("the advisory lock on %q is %+v", key, l)
			}
			if n := len(look(t, i, key).Locks); n != 2 {
				t.Errorf("%q has %d locks", key, n)
			}
		}
		if len(snap.Locks) != 2*len(keys) {
			t.Errorf("there are %d locks: %+v", len(snap.Locks), snap.Locks)
		}
		if g := gap(snap, "the keys of"); g != nil {
			t.Errorf("asked for keys: %+v", g)
		}
		all := look(t, i)
		hashed := 0
		for _, l := range all.Locks {
			if l.Strategy == "advisory" && l.Key == "" {
				if hashed++; !strings.Contains(l.Name, "#") {
					t.Errorf("the key of %+v is not told", l)
				}
			}
		}
		if s.mysql() && (hashed == 0 || gap(all, fmt.Sprintf("the keys of %d locks", hashed)) == nil) {
			t.Errorf("%d keys are not told, and the gaps are %+v", hashed, all.Gaps)
		}
		for _, key := range []string{"%", "_"} { // one that nobody has
			if free := look(t, i, key+"x"); len(free.Locks) != 1 || free.Locks[0].Strategy != "" || free.Locks[0].Key != key+"x" || free.Locks[0].Token != inspect.Value(uint64(0)) {
				t.Errorf("a free key: %+v", free.Locks)
			}
		}
	})
}

// rowsLocked locks rows as a program does, and lets it go at the end.
func (s *scratch) rowsLocked(lock string, names ...string) *sql.Tx {
	s.T.Helper()
	tx, err := s.root.Begin()
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { _ = tx.Rollback() })
	for _, name := range names {
		dbtest.Exec(s.T, tx, s.lockSQL(lock, name))
	}
	return tx
}

func (s *scratch) lockSQL(lock, name string) string {
	return fmt.Sprintf("SELECT 1 FROM `%s`.`mysqllock` WHERE namespace = x'%x' AND name = x'%x' %s /* mysqllock 00 */", s.Name, s.Name, name, lock)
}

// rowAwaited waits for a row.
func (s *scratch) rowAwaited(lock, name string) {
	s.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	conn, err := s.root.Conn(ctx)
	dbtest.OK(s.T, err)
	var id uint64
	dbtest.OK(s.T, conn.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id))
	_, err = conn.ExecContext(ctx, "SET SESSION innodb_lock_wait_timeout = 3600") // until the end, however slow the machine is
	dbtest.OK(s.T, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = conn.ExecContext(ctx, s.lockSQL(lock, name))
	}()
	s.T.Cleanup(func() { dbtest.Exec(s.T, s.root, fmt.Sprintf("KILL %d", id)); <-done; cancel(); conn.Close() })
	waiting := "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id = ?"
	if s.mysql() {
		waiting = "SELECT COUNT(DISTINCT t.PROCESSLIST_ID) FROM performance_schema.data_lock_waits w" +
			" JOIN performance_schema.threads t ON t.THREAD_ID = w.REQUESTING_THREAD_ID WHERE t.PROCESSLIST_ID = ?"
	}
	dbtest.Soon(s.T, "it waits", func() bool {
		var n int
		s.copy.fresh(func() { dbtest.OK(s.T, s.root.QueryRow(waiting, id).Scan(&n)) })
		return n == 1
	})
}

func (s *scratch) makeTable(names ...string) {
	s.T.Helper()
	table, err := schema.Parse(s.Name + ".mysqllock")
	dbtest.OK(s.T, err)
	for _, text := range table.Setup() {
		dbtest.Exec(s.T, s.root, text)
	}
	for _, name := range names {
		dbtest.Exec(s.T, s.root, fmt.Sprintf("INSERT INTO mysqllock (namespace, name, token) VALUES (x'%x', x'%x', 3)", s.Name, name))
	}
}

func TestSlotsAndStripesAreShownByTheirKeys(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		long := strings.Repeat("l", 255)
		zero := "\x00" + long[:254]
		names := []string{ // a program that has keys share rows has no others, but here all are together
			"k", keyrow.SlotName("k", 2), long, keyrow.SlotName(long, 1), keyrow.Name(zero),
			keyrow.StripeName(37), keyrow.SlotName(keyrow.StripeName(37), 1),
		}
		s.makeTable(append(names, schema.Stripes)...)
		dbtest.Exec(t, s.root, "UPDATE mysqllock SET token = 64 WHERE name = x'"+hex.EncodeToString([]byte(schema.Stripes))+"'")
		dbtest.Exec(t, s.root, "UPDATE mysqllock SET versioned = 1 WHERE name = 'k'")
		s.rowsLocked("FOR UPDATE", append(names, schema.Stripes)...)
		for _, name := range names { // MariaDB shows them while somebody waits
			s.rowAwaited("FOR UPDATE", name)
		}
		i := s.inspector(s.root)
		want := []inspect.Lock{
			{Key: "", Stripe: -1, Name: keyrow.Name(zero)},
			{Key: "", Stripe: 37},
			{Key: "", Stripe: 37, Slot: 1},
			{Key: "k", Stripe: -1, Versioned: inspect.Value(true)},
			{Key: "k", Stripe: -1, Slot: 2},
			{Key: long, Stripe: -1},
			{Key: long, Stripe: -1, Slot: 1},
		}
		dbtest.Eventually(t, "all are shown", func() error {
			got := look(t, i).Locks
			if !slices.EqualFunc(got, want, func(a, b inspect.Lock) bool {
				return a.Strategy == "row" && a.Key == b.Key && a.Stripe == b.Stripe && a.Slot == b.Slot && value(a.Versioned) == value(b.Versioned) && value(a.Token) == 3 &&
					len(a.Holders.List) == 1 && len(a.Waiters.List) == 1 && (b.Name == "" || b.Name == a.Name)
			}) {
				return fmt.Errorf("the locks are %+v", got)
			}
			return nil
		})
		shared := "k" // a key that is on stripe 37
		for n := 0; keyrow.Stripe(shared, 64) != keyrow.StripeName(37); n++ {
			shared = fmt.Sprint("k", n)
		}
		var stripes []int
		for _, l := range look(t, i, shared).Locks {
			stripes = append(stripes, l.Stripe, l.Slot)
		}
		if !slices.Equal(stripes, []int{37, 0, 37, 1}) {
			t.Errorf("a key of stripe 37 has the stripes and slots %v", stripes)
		}
	})
}

// TestSlotsAndSharesOfTheDriverAreShown as it takes them.
func TestSlotsAndSharesOfTheDriverAreShown(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		count := func(key string) (slots, holders, waiters int) {
			for _, l := range look(t, i, key).Locks {
				if l.Key == key && l.Strategy == "row" {
					slots, holders, waiters = slots+1, holders+len(l.Holders.List), waiters+len(l.Waiters.List)
				}
			}
			return slots, holders, waiters
		}
		db := s.process("root", "holder")
		for range 2 {
			s.acquire(db, "slots", lockctx.Slots(2))
			s.acquire(db, "shared", lockctx.Shared())
		}
		for key, option := range map[string]lockctx.Option{"slots": lockctx.Slots(2), "shared": lockctx.Row()} {
			s.queue(func() int { _, _, waiters := count(key); return waiters }, "root", key, 1, option)
		}
		shown := 1 // MariaDB shows the slot that is waited for
		if s.mysql() {
			shown = 2
		}
		dbtest.Soon(t, "the slots are shown", func() bool { // who waits for a slot tries one after the other
			slots, holders, waiters := count("slots")
			return slots == shown && holders == shown && waiters == 1
		})
		dbtest.Soon(t, "those who share are shown", func() bool {
			_, holders, waiters := count("shared")
			return holders >= shown && holders <= 2 && waiters == 1
		})
	})
}

// Those who share a row are told from each other as far as the server does.
func TestThoseWhoShareARowAreToldApart(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		s.makeTable("one", "two", "both", "mixed")
		i := s.inspector(s.root)
		count := func(key string) (known, unknown, waiters int) {
			l := find(look(t, i), "row", key)
			if l == nil {
				return 0, 0, 0
			}
			for _, h := range l.Holders.List {
				if !h.Shared {
					t.Errorf("%s: %+v does not share", key, h)
				}
				if h.ConnectionID == 0 {
					unknown++
				} else {
					known++
				}
			}
			return known, unknown, len(l.Waiters.List)
		}
		s.rowsLocked("LOCK IN SHARE MODE", "one")
		s.rowAwaited("FOR UPDATE", "one")
		s.rowAwaited("LOCK IN SHARE MODE", "one")
		if known, unknown, waiters := count("one"); known != 1 || unknown != 0 || waiters != 2 {
			t.Errorf("one: %d, %d, %d", known, unknown, waiters)
		}
		s.rowsLocked("LOCK IN SHARE MODE", "two")
		s.rowsLocked("LOCK IN SHARE MODE", "two")
		s.rowAwaited("FOR UPDATE", "two")
		known, unknown, waiters := count("two")
		if s.mysql() && known != 2 || !s.mysql() && (known != 0 || unknown != 1) || waiters != 1 {
			t.Errorf("two: %d, %d, %d", known, unknown, waiters)
		}
		if snap := look(t, i); !s.mysql() && gap(snap, `who shares the row of "two"`) == nil {
			t.Errorf("the gaps are %+v", snap.Gaps)
		}
		s.rowsLocked("LOCK IN SHARE MODE", "both")
		writer := s.rowsLocked("LOCK IN SHARE MODE", "both")
		dbtest.Exec(t, writer, "INSERT INTO mysqllock (namespace, name) VALUES ('w', 'w')")
		s.rowAwaited("FOR UPDATE", "both")
		known, unknown, waiters = count("both")
		if s.mysql() && known != 2 || !s.mysql() && (known != 1 || unknown != 1) || waiters != 1 {
			t.Errorf("both: %d, %d, %d", known, unknown, waiters)
		}
		s.rowsLocked("FOR UPDATE", "mixed")
		s.rowAwaited("LOCK IN SHARE MODE", "mixed")
		if l := find(look(t, i), "row", "mixed"); l == nil || len(l.Holders.List) != 1 || l.Holders.List[0].Shared || l.Holders.List[0].ConnectionID == 0 || len(l.Waiters.List) != 1 || !l.Waiters.List[0].Shared {
			t.Errorf("mixed: %+v", l)
		}
	})
}

// wakeUp is the name of the wake-up lock of a key's lease.
func (s *scratch) wakeUp(key string) string {
	return lockname.OfWakeUp(s.Name, key)
}

// TestAWaiterForALeaseThatIsJustGoneIsShown: it was given back just now.
func TestAWaiterForALeaseThatIsJustGoneIsShown(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.makeTable("k", "l")
		holder, err := s.root.Conn(t.Context())
		dbtest.OK(t, err)
		defer holder.Close()
		dbtest.ExecIn(t, t.Context(), holder, "DO GET_LOCK('"+s.wakeUp("k")+"', 0)")
		ctx, cancel := context.WithCancel(t.Context())
		waits := make(chan struct{})
		go func() {
			defer close(waits)
			_, _ = s.root.ExecContext(ctx, "DO GET_LOCK('"+s.wakeUp("k")+"', 300)")
		}()
		defer func() { cancel(); <-waits }()
		i := s.inspector(s.root)
		dbtest.Soon(t, "the waiter is shown", func() bool {
			l := find(look(t, i), "lease", "k")
			return l != nil && len(l.Holders.List) == 0 && len(l.Waiters.List) == 1 && value(l.Token) == 3 && len(look(t, i).Locks) == 1
		})
	})
}

// TestAWaiterWithTheWakeUpLockIsShown: it is the first one, and the holder of the lease has lost the wake-up lock.
func TestAWaiterWithTheWakeUpLockIsShown(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		if s.kind == plainMariaDB {
			t.Skip("the server does not tell the programs")
		}
		s.acquire(s.process("root", "first"), "k", lockctx.Lease(time.Hour)) // which is not renewed meanwhile
		i := s.inspector(s.root)
		if l := find(look(t, i), "lease", "k"); l == nil || l.Holders.List[0].User != "root" || l.Holders.List[0].PID != os.Getpid() || len(l.Waiters.List) > 0 {
			t.Errorf("the holder has the wake-up lock: %+v", l)
		}
		dbtest.Exec(t, s.root, "UPDATE mysqllock SET owner = 'web-1:4711:shop#12345678' WHERE name = 'k'")
		l := find(look(t, i), "lease", "k")
		if l == nil || len(l.Waiters.List) != 1 || l.Waiters.List[0].Program != "first" {
			t.Fatalf("another has the wake-up lock: %+v", l)
		}
		if want := (inspect.Client{Host: "web-1", Program: "web-1:4711:shop", PID: 4711}); l.Holders.List[0].Client != want {
			t.Errorf("the holder is %+v", l.Holders.List[0])
		}
	})
}

func TestOtherNamespacesAreShownOnlyOnRequest(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.makeTable("k", keyrow.Name("x"))
		dbtest.Exec(t, s.root, "INSERT INTO mysqllock (namespace, name, owner, expires) VALUES ('other', 'k', 'me#00000000', UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE)")
		other, err := s.root.Begin()
		dbtest.OK(t, err)
		defer other.Rollback()
		dbtest.Exec(t, other, "SELECT GET_LOCK('mysqllock:"+s.Name+"-other/k', 0), l.* FROM mysqllock l WHERE namespace = 'other' FOR UPDATE")
		i := s.inspector(s.root)
		for _, l := range look(t, i).Locks {
			t.Errorf("another namespace's lock is shown: %+v", l)
		}
		if locks := look(t, i, "k").Locks; len(locks) != 1 || locks[0].Strategy != "" {
			t.Errorf("another namespace's lock is shown: %+v", locks)
		}
		snap, err := i.Snapshot(t.Context(), inspect.Filter{AllNamespaces: true})
		dbtest.OK(t, err)
		l := find(snap, "lease", "k")
		if l == nil || l.Namespace != "other" || !l.Holders.List[0].Left || l.Holders.List[0].Program != "me" {
			t.Errorf("all are %+v", snap.Locks)
		}
		if _, err := i.Snapshot(t.Context(), inspect.Filter{AllNamespaces: true, Keys: []string{"k"}}); err == nil {
			t.Error("a key of all namespaces is no error")
		}
	})
}
