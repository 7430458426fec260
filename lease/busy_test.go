package lease

import (
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// TestRenewalOfABusyRow: a lease whose row was locked for long when it was renewed last is
// renewed in one statement the next time.
func TestRenewalOfABusyRow(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := request("k")
		r.TTL = 6 * time.Second
		lease := l.acquire(r)
		skipped := 1
		for round := 0; round < 10 && skipped > 0; round++ { // on a busy machine one takes longer than the server lets a statement wait, and is begun again
			moment, err := s.db.Begin()
			dbtest.OK(t, err)
			defer moment.Rollback()
			_, err = moment.Exec("SELECT 1 FROM " + s.table.String() + " WHERE " + l.row("", "k") + " LOCK IN SHARE MODE")
			dbtest.OK(t, err)
			since := l.tap.Texts()
			l.renewNow(lease)
			dbtest.Soon(t, "the renewal waits", func() bool {
				return len(s.threads("INFO LIKE 'INSERT INTO %' AND INFO NOT LIKE '%SKIP LOCKED%' AND INFO LIKE '%STRAIGHT_JOIN%'")) > 0
			})
			time.Sleep(r.TTL / 10) // long enough to matter
			skipped = 0
			for _, text := range since() {
				if strings.Contains(text, "SKIP LOCKED") {
					skipped++
				}
			}
			before := lease.Expiry()
			dbtest.OK(t, moment.Commit())
			dbtest.Soon(t, "it is renewed", func() bool { return lease.Expiry().After(before) })
		}
		if skipped > 0 {
			t.Errorf("%d statements before the one that waits", skipped)
		}
		dbtest.OK(t, lease.Release())
	})
}
