package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTheServerRefusesOurParametersOnThePlainDriver, as docs/removing.md says: each of them, with error 1193 or, of a
// list, 1064. Without them lockctx.With is silent, and Do and Acquire name the driver.
func TestTheServerRefusesOurParametersOnThePlainDriver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		unknown, unread := uint16(1193), uint16(1064)
		for parameter, want := range map[string][]uint16{
			"maxConns=25":                 {unknown},
			"lockWait=5s":                 {unknown},
			"lockTTL=30s":                 {unknown},
			"lockTable=locks":             {unknown},
			"lockTable=shop.locks":        {unknown},
			"lockNamespace=shop":          {unknown},
			"lockStripes=64":              {unknown},
			"lockOwner=host:7:shopd":      {unknown},
			"lockStrategy=lease":          {unknown},
			"lockNoWait=true":             {unknown},
			"lockSchema=manual":           {unknown},
			"lockRequire=products":        {unknown},
			"lockMaxConns=9":              {unknown},
			"lockRequire=products,orders": {unknown, unread}, // SET knows no lists
			"lockRequire=order_*":         {unknown, unread},
		} {
			db, err := sql.Open("mysql", s.DSN(parameter))
			dbtest.OK(t, err)
			var refused *mysql.MySQLError
			if err := db.PingContext(t.Context()); !errors.As(err, &refused) || !slices.Contains(want, refused.Number) {
				t.Errorf("%s: the server says %v", parameter, err)
			}
			dbtest.OK(t, db.Close())
		}
		other := s.open()
		holder := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), other)
		ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait())
		tx := dbtest.Begin(t, ctx, s.plain)
		stock.MustRead(t, ctx, tx, 1)
		dbtest.OK(t, tx.Commit())
		dbtest.OK(t, holder.Rollback())
		err := mysqllock.Do(ctx, s.plain, "k", func(context.Context) error { t.Error("it runs"); return nil })
		dbtest.Says(t, err, "opened with driver", "*mysql.MySQLDriver", `"mysqllock"`)
		_, err = mysqllock.Acquire(ctx, s.plain, "k")
		dbtest.Says(t, err, "opened with driver", "*mysql.MySQLDriver", `"mysqllock"`)
	})
}
