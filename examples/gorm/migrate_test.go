package gormshop

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/go-sql-driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// Country, City and Street are made in this order: each refers to the one before.
type Country struct {
	ID   uint
	Name string `gorm:"size:100;uniqueIndex"`
}

// City is in a country.
type City struct {
	ID        uint
	Name      string `gorm:"size:100;index"`
	CountryID uint
	Country   Country
}

// Street is in a city.
type Street struct {
	ID     uint
	CityID uint
	City   City
}

// testMigrate: of three replicas that migrate at once none fails, where without the lock some do.
func testMigrate(t *testing.T, shop *testshop.Shop) {
	var replicas []*gorm.DB
	for range 3 {
		db, err := Open(shop.LockDSN(), &gorm.Config{Logger: logger.Discard})
		check(t, err)
		closeLater(t, db)
		replicas = append(replicas, db)
	}
	models := []any{&Country{}, &City{}, &Street{}}
	all := func(migrate func(context.Context, *gorm.DB, ...any) error) []error {
		check(t, replicas[0].Migrator().DropTable(models...))
		errs := make([]error, len(replicas))
		start := make(chan struct{})
		var wg sync.WaitGroup
		for i, db := range replicas {
			wg.Go(func() {
				<-start
				errs[i] = migrate(t.Context(), db, models...)
			})
		}
		close(start)
		wg.Wait()
		return errs
	}
	const rounds = 5
	there := 0
	for range 20 * rounds { // without this the rest would show nothing
		for _, err := range all(func(_ context.Context, db *gorm.DB, models ...any) error { return db.AutoMigrate(models...) }) {
			var e *mysql.MySQLError
			if errors.As(err, &e) && e.Number == 1050 {
				there++
			}
		}
		if there > 0 {
			break
		}
	}
	if there == 0 {
		t.Error("no replica got error 1050 without the lock")
	}
	for range rounds {
		check(t, errors.Join(all(Migrate)...))
		check(t, replicas[0].Create(&Street{City: City{Name: "Ulm", Country: Country{Name: "Germany"}}}).Error)
	}
}
