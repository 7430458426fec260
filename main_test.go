package mysqllock_test

import (
	"database/sql"
	"errors"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The tests run against every server that is found on this machine, one subtest
// tree each, or against the one that MYSQLLOCK_TEST_DSN names.

func TestMain(m *testing.M) {
	jobs().Run()
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// together are subtests that do little but wait. They run all at once: t.Parallel would
// have most of them wait for one of the few places that -parallel gives, too. The test
// may not end before Wait.
type together struct{ sync.WaitGroup }

// Run starts a subtest.
func (g *together) Run(t *testing.T, name string, test func(t *testing.T)) {
	g.Go(func() { t.Run(name, test) })
}

// scratch is a database of one test, with a table p (id, stock) that has a few
// products of stock 10.
type scratch struct {
	*stock.Shop
	plain *sql.DB // Plain, for short
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	shop := stock.NewShop(d)
	return &scratch{shop, shop.Plain}
}

// at is the same database by another way: of another account, or for a subtest.
func (s *scratch) at(d *dbtest.Database) *scratch {
	return &scratch{&stock.Shop{Database: d, Plain: s.plain}, s.plain}
}

// open opens the scratch database with the driver under test. params are added
// to the DSN, such as "lockWait=1s".
func (s *scratch) open(params ...string) *sql.DB { s.T.Helper(); return s.Handle(params...) }

// limited opens it with at most n connections.
func (s *scratch) limited(t *testing.T, n int, params ...string) *sql.DB {
	t.Helper()
	return s.Limited(t, n, params...)
}

// tapped opens it through a tap on its connections.
func (s *scratch) tapped(c mysqllock.Config) (*sql.DB, *dbtest.Tap) { s.T.Helper(); return s.Tapped(c) }

func (s *scratch) stock(id int) int        { s.T.Helper(); return s.Stock(id) }
func (s *scratch) wantStock(id, want int)  { s.T.Helper(); s.WantStock(id, want) }
func (s *scratch) locked(key string) bool  { s.T.Helper(); return s.Locked(key) }
func (s *scratch) leased(key string) bool  { s.T.Helper(); return s.Leased(key) }
func (s *scratch) token(key string) uint64 { s.T.Helper(); return s.Token(key) }

func (s *scratch) wantLocked(key string, want bool) {
	s.T.Helper()
	if got := s.locked(key); got != want {
		s.T.Errorf("locked(%s) = %v, want %v", key, got, want)
	}
}

// naming runs what is refused, again where a busy server did not say in time who
// has the lock.
func naming(refused func() error) (err error) {
	for range 20 {
		var e *mysqllock.Error
		if err = refused(); !errors.As(err, &e) || e.Holder != nil {
			break
		}
	}
	return err
}
