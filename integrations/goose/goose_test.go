package gooselock_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"os"
	"testing"
	"testing/fstest"
	"time"

	"github.com/pressly/goose/v3"

	gooselock "github.com/mysqllock/mysqllock/integrations/goose"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// ways are the ways to migrate in one process of many.
var ways = map[string]func(ctx context.Context, db *sql.DB, migrations fs.FS) error{
	"locker":  Migrate,
	"checked": MigrateChecked,
	"session": func(ctx context.Context, db *sql.DB, migrations fs.FS) error {
		locker := gooselock.NewLocker(db, gooselock.Key("shop"), gooselock.TTL(stock.TTL), gooselock.Wait(time.Minute))
		provider, err := goose.NewProvider(goose.DialectMySQL, db, migrations, goose.WithSessionLocker(locker))
		if err != nil {
			return err
		}
		_, err = provider.Up(ctx)
		return err
	},
}

// They fail if they run twice. The second takes longer than lockWait.
var migrations = fstest.MapFS{
	"1_shop.sql": {Data: []byte("-- +goose Up\nCREATE TABLE orders (id INT PRIMARY KEY);\nINSERT INTO orders VALUES (1);\n")},
	"2_more.sql": {Data: []byte("-- +goose Up\nALTER TABLE orders ADD buyer VARCHAR(9);\nDO SLEEP(0.5);\nINSERT INTO orders (id) VALUES (2);\n")},
}

func TestMain(m *testing.M) {
	jobs := dbtest.Jobs{}
	for name, migrate := range ways {
		jobs[name] = func(db *sql.DB, _ *bufio.Scanner) { fmt.Println(migrate(context.Background(), db, migrations)) }
	}
	jobs.Run()
	os.Exit(tempserver.Tests{M: m}.Run())
}

// Of three processes that migrate at the same time one does, and none fails.
func TestOneProcessMigratesAndNoneFails(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name := range ways {
			dbtest.Exec(t, s.Plain, "DROP TABLE IF EXISTS orders, goose_db_version")
			dbtest.OK(t, Migrate(dbtest.Limited(t), s.Handle(), fstest.MapFS{"1_shop.sql": migrations["1_shop.sql"]})) // goose's own table is there
			var all [3]*dbtest.Child
			for i := range all {
				all[i] = dbtest.StartJob(t, name, s.DSN("lockWait=100ms"))
			}
			for _, child := range all {
				if said := child.Line(); said != "<nil>" {
					t.Errorf("%s: a process says %s", name, said)
				}
			}
			if rows := dbtest.Column[int](t, s.Plain, "SELECT id FROM orders WHERE buyer IS NULL"); len(rows) != 2 {
				t.Errorf("%s: the migrations have left the rows %v", name, rows)
			}
		}
	})
}

// A lost lock is told by the locker in the end, and stops goose in Do.
func TestALostLockStopsGoose(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		locker := gooselock.NewLocker(db)
		dbtest.OK(t, locker.Lock(dbtest.Limited(t), db))
		s.Steal(gooselock.DefaultKey)
		stock.WantLost(t, "Unlock", locker.Unlock(dbtest.Limited(t), db))

		dbtest.Exec(t, s.Plain, "DELETE FROM mysqllock")
		stolen := fmt.Sprintf("UPDATE mysqllock SET owner = 'thief#00000000', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 60 SECOND WHERE name = '%s';\n", gooselock.DefaultKey)
		stock.WantLost(t, "MigrateChecked", MigrateChecked(dbtest.Limited(t), db, fstest.MapFS{
			"1_thief.sql": {Data: []byte("-- +goose Up\n" + stolen + "CREATE TABLE late (id INT);\n")},
		}))
		if made := dbtest.Column[string](t, s.Plain, "SHOW TABLES LIKE 'late'"); len(made) > 0 {
			t.Error("it went on without the lock")
		}
	})
}
