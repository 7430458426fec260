package mysqllock_test

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestLongHold: a hold that lasts for long is told while it lasts, once, and at its end. A
// version is no hold.
func TestLongHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		short, calm := s.watched(mysqllock.Config{TTL: ttl, LongHold: time.Hour})
		db, w := s.watched(mysqllock.Config{TTL: ttl, LongHold: time.Millisecond})
		for strategy, kind := range strategies {
			if strategy == "optimistic" {
				ctx := lockctx.With(dbtest.Limited(t), "key-optimistic", kind)
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				time.Sleep(20 * time.Millisecond)
				dbtest.OK(t, tx.Commit())
				w.told(t, "optimistic acquired key-optimistic", "optimistic released key-optimistic")
				continue
			}
			key := "key-" + strategy
			hold, err := mysqllock.Acquire(dbtest.Limited(t), db, key, kind)
			dbtest.OK(t, err)
			events := w.told(t, strategy+" acquired "+key, strategy+" long hold "+key)
			if e := events[1]; !e.Long || e.Held < time.Millisecond || e.Token != events[0].Token || events[0].Long {
				t.Errorf("while it lasts: %+v, after %+v", e, events[0])
			}
			dbtest.OK(t, hold.Release())
			for _, e := range w.told(t, strategy+" released "+key) {
				if !e.Long || e.Held < events[1].Held {
					t.Errorf("at the end: %+v, before %+v", e, events[1])
				}
			}

			hold, err = mysqllock.Acquire(dbtest.Limited(t), short, key, kind)
			dbtest.OK(t, err)
			dbtest.OK(t, hold.Release())
			for _, e := range calm.told(t, strategy+" acquired "+key, strategy+" released "+key) {
				if e.Long {
					t.Errorf("a short one: %+v", e)
				}
			}
		}
		if _, err := mysqllock.NewConnector(s.Config(), mysqllock.Config{LongHold: -1}); err == nil {
			t.Error("a negative LongHold is taken")
		}
	})
}
