package lease

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
)

// TestSilentHolder: a lease of a holder that stands still, or was cut off, goes to a waiter
// with its wake-up lock, so that the next one is woken; and without it if the connection
// that has it is another account's.
func TestSilentHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		user := "other_" + dbtest.Random()
		dbtest.Exec(t, s.db, "CREATE USER "+user)
		defer dbtest.Exec(t, s.db, "DROP USER "+user)
		dbtest.Exec(t, s.db, "GRANT ALL ON "+s.Name+".* TO "+user)
		l, other := s.locker(setup{}), s.locker(setup{user: user})
		dbtest.OK(t, l.acquire(request("k")).Release()) // makes the row
		dbtest.OK(t, other.acquire(request("j")).Release())
		if !s.followsSilent(l, "k", 10) {
			t.Error("the lease has not its wake-up lock")
		}
		if s.followsSilent(other, "j", 1) {
			t.Error("another account's connection was closed")
		}
	})
}

// followsSilent has l take the lease on key of a holder that stands still, and reports
// whether it has its wake-up lock then. A server that is slow has several tries.
func (s *scratch) followsSilent(l *locker, key string, tries int) (has bool) {
	s.T.Helper()
	wakeUp := lockname.OfWakeUp(s.Name, key)
	for ; tries > 0 && !has; tries-- {
		silent, err := s.db.Conn(dbtest.Limited(s.T))
		dbtest.OK(s.T, err)
		_, err = silent.ExecContext(dbtest.Limited(s.T), "DO GET_LOCK('"+wakeUp+"', 0)")
		dbtest.OK(s.T, err)
		s.set(key, "owner = 'silent#12345678', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 2 SECOND")
		lease := l.acquire(waiting(key, 25*time.Second))
		h := lease.conn
		dbtest.OK(s.T, h.c.AwaitTurn(dbtest.Limited(s.T)))
		rows, err := h.query(dbtest.Limited(s.T), "SELECT COALESCE(IS_USED_LOCK('"+wakeUp+"') = CONNECTION_ID(), 0)")
		h.c.EndTurn()
		dbtest.OK(s.T, err)
		has = rows[0][0] == "1"
		dbtest.OK(s.T, lease.Release())
		_, _ = silent.ExecContext(dbtest.Limited(s.T), "DO RELEASE_LOCK('"+wakeUp+"')") // it may be closed
		dbtest.OK(s.T, silent.Close())
	}
	return has
}
