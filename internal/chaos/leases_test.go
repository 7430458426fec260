package chaos

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestLeasesGoByTheServersClock: no statement of a lease's life carries the client's time. That
// sessions whose clocks show other times agree on leases, package lease shows.
func TestLeasesGoByTheServersClock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const ttl = 4 * time.Second
		ctx := dbtest.Limited(t)
		db, tap := s.Tapped(mysqllock.Config{})
		dbtest.OK(t, mysqllock.Do(ctx, db, "warm", func(context.Context) error { return nil }, lockctx.Lease(ttl))) // makes the table
		seen := tap.Since()
		sent := func(what string) bool {
			return slices.ContainsFunc(seen(), func(c dbtest.Command) bool { return strings.Contains(c.Text, what) })
		}
		dbtest.OK(t, mysqllock.Do(ctx, db, "job", func(ctx context.Context) error {
			dbtest.Soon(t, "it is renewed", func() bool { return sent("d.ttl") })
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
			return err
		}, lockctx.Lease(ttl)))
		for _, what := range []string{fmt.Sprintf("INTERVAL %d MICROSECOND", ttl.Microseconds()), "d.ttl", "RELEASE_LOCK", "COMMIT"} {
			if !sent(what) {
				t.Errorf("the tap has not seen %s", what)
			}
		}
		for _, c := range seen() {
			if what := clientTime(c.Text, time.Now()); what != "" {
				t.Errorf("a statement carries the client's time, %s: %s", what, c.Text)
			}
		}
		for _, bad := range []string{time.Now().UTC().Format(time.DateTime), fmt.Sprint(time.Now().Unix()), fmt.Sprint(time.Now().UnixMicro())} {
			if clientTime("SELECT '"+bad+"'", time.Now()) == "" {
				t.Errorf("the check does not see %s", bad)
			}
		}
	})
}

var (
	datePattern   = regexp.MustCompile(`\d{4}-\d\d-\d\d`)
	numberPattern = regexp.MustCompile(`\b\d{10,}\b`)
)

// clientTime returns what in a statement looks like the current time.
func clientTime(text string, now time.Time) string {
	if date := datePattern.FindString(text); date != "" {
		return date
	}
	for _, number := range numberPattern.FindAllString(text, -1) {
		n, _ := strconv.ParseFloat(number, 64)
		for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond, time.Nanosecond} {
			if off := n - float64(now.UnixNano())/float64(unit); max(off, -off)*unit.Seconds() < 1e6 {
				return number
			}
		}
	}
	return ""
}
