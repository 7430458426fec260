package gooselock_test

import (
	"context"
	"database/sql"
	"io/fs"
	"log"
	"os"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/mysqllock/mysqllock"
	gooselock "github.com/mysqllock/mysqllock/integrations/goose"
	"github.com/mysqllock/mysqllock/lockctx"
)

func Migrate(ctx context.Context, db *sql.DB, migrations fs.FS) error {
	provider, err := goose.NewProvider(goose.DialectMySQL, db, migrations, goose.WithLocker(gooselock.NewLocker(db)))
	if err != nil {
		return err
	}
	_, err = provider.Up(ctx)
	return err
}

func MigrateChecked(ctx context.Context, db *sql.DB, migrations fs.FS) error {
	provider, err := goose.NewProvider(goose.DialectMySQL, db, migrations, goose.WithIsolateDDL(true))
	if err != nil {
		return err
	}
	return mysqllock.Do(ctx, db, "goose", func(ctx context.Context) error {
		_, err := provider.Up(ctx)
		return err
	}, lockctx.Lease(30*time.Second), lockctx.Wait(time.Hour))
}

// At the start of each pod.
func Example() {
	db, err := sql.Open("mysqllock", "app:pw@tcp(127.0.0.1:3306)/shop")
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	if err := Migrate(context.Background(), db, os.DirFS("migrations")); err != nil {
		log.Fatal(err)
	}
}
