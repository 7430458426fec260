package vitess

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
)

// TestNothingIsLostWithSeveralStatementsInOneText, by which row locks go from one caller to the next: vtgate takes
// such a text, and a guard stops it.
func TestNothingIsLostWithSeveralStatementsInOneText(t *testing.T) {
	s := newScratch(t)
	cfg, err := mysql.ParseDSN(one.DSN("shop") + "?multiStatements=true")
	dbtest.OK(t, err)
	conn, err := dbtest.Connector(t, cfg).Connect(t.Context())
	dbtest.OK(t, err)
	defer conn.Close()
	info, err := server.Probe(t.Context(), conn)
	dbtest.OK(t, err)
	if why, err := info.TakesPackets(t.Context(), conn); why != "" || err != nil {
		t.Errorf("%s, %v", why, err)
	}

	tap := new(dbtest.Tap)
	db := s.tapped(tap)
	sent := tap.Texts()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 10 {
				err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
					return s.count(ctx, db, func() {})
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	var n, packets int
	dbtest.OK(t, db.QueryRow("SELECT n FROM "+s.in("c")+" WHERE id = 1").Scan(&n))
	for _, text := range sent() {
		if strings.HasPrefix(text, "COMMIT; SELECT "+server.Untimed+"1; SELECT ") {
			packets++
		}
	}
	if n != 80 || packets == 0 {
		t.Errorf("80 callers have counted to %d, by %d texts of several statements", n, packets)
	}
}
