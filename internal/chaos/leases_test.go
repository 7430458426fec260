package chaos

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestLeasesGoByTheServersClock: sessions whose clocks show other times agree on leases, and no
// statement of a lease's life carries the client's time.
func TestLeasesGoByTheServersClock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		ctx := dbtest.Within(t, time.Minute)
		const ttl = 4 * time.Second
		zones := []string{"+13:00", "-11:00", "+00:00"}
		dbs := make(map[string]*sql.DB)
		for _, zone := range zones {
			dbs[zone] = s.Handle("time_zone=%27" + strings.ReplaceAll(zone, "+", "%2B") + "%27")
			var got string
			dbtest.OK(t, dbs[zone].QueryRow("SELECT @@time_zone").Scan(&got))
			if got != zone {
				t.Fatalf("the session's time zone is %s, want %s", got, zone)
			}
			dbtest.OK(t, mysqllock.Do(ctx, dbs[zone], zone, func(context.Context) error { return nil }, lockctx.Lease(ttl))) // opens connections
		}
		var all sync.WaitGroup
		for _, first := range zones {
			for _, second := range zones {
				if first == second {
					continue
				}
				all.Go(func() {
					key := first + second
					holding, vanish := context.WithCancel(ctx)
					defer vanish()
					start := time.Now()
					h, err := mysqllock.Acquire(holding, dbs[first], key, lockctx.Lease(ttl))
					if err != nil {
						t.Error(err)
						return
					}
					defer h.Release()
					vanish() // so that it is not renewed any more
					if _, err := mysqllock.Acquire(ctx, dbs[second], key, lockctx.Lease(ttl), lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
						t.Errorf("%s beside %s: %v", second, first, err)
					}
					if !s.Leased(key) {
						t.Errorf("the lease of %s does not look live", first)
					}
					next, err := mysqllock.Acquire(ctx, dbs[second], key, lockctx.Lease(ttl))
					if err != nil {
						t.Error(err)
						return
					}
					if took := time.Since(start); took < ttl || took > ttl+20*time.Second {
						t.Errorf("%s took over from %s after %v, want %v", second, first, took, ttl)
					}
					if err := next.Release(); err != nil {
						t.Error(err)
					}
				})
			}
		}

		db, tap := s.Tapped(mysqllock.Config{})
		dbtest.OK(t, mysqllock.Do(ctx, db, "warm", func(context.Context) error { return nil }, lockctx.Lease(ttl))) // makes the table
		seen := tap.Since()
		dbtest.OK(t, mysqllock.Do(ctx, db, "job", func(ctx context.Context) error {
			time.Sleep(ttl * 3 / 2)
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
			return err
		}, lockctx.Lease(ttl)))
		commands := seen()
		for _, what := range []string{fmt.Sprintf("INTERVAL %d MICROSECOND", ttl.Microseconds()), "d.ttl", "RELEASE_LOCK", "COMMIT"} {
			if !slices.ContainsFunc(commands, func(c dbtest.Command) bool { return strings.Contains(c.Text, what) }) {
				t.Errorf("the tap has not seen %s", what)
			}
		}
		for _, c := range commands {
			if what := clientTime(c.Text, time.Now()); what != "" {
				t.Errorf("a statement carries the client's time, %s: %s", what, c.Text)
			}
		}
		all.Wait()
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
