package tidb

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/engine"
	kinds "github.com/mysqllock/mysqllock/internal/server"
)

// TestNothingIsLostWithSeveralStatementsInOneText, by which row locks go from one caller to the next. TiDB takes such
// a text with a guard of its own: MySQL's stops every text.
func TestNothingIsLostWithSeveralStatementsInOneText(t *testing.T) {
	s := newScratch(t)
	cfg, err := mysql.ParseDSN(s.with("multiStatements=true"))
	dbtest.OK(t, err)
	conn, err := dbtest.Connector(t, cfg).Connect(t.Context())
	dbtest.OK(t, err)
	defer conn.Close()
	info, err := kinds.Probe(t.Context(), conn)
	dbtest.OK(t, err)
	if why, err := info.TakesPackets(t.Context(), conn); why != "" || err != nil {
		t.Errorf("%s, %v", why, err)
	}
	lazy := info.Flavour
	lazy.EagerSubqueries = false
	if why, err := lazy.TakesPackets(t.Context(), conn); !strings.Contains(why, "to let pass") || err != nil {
		t.Errorf("with MySQL's guard: %q, %v", why, err)
	}

	tap := new(dbtest.Tap)
	db := engine.Tapped(t, s.dsn, tap, mysqllock.Config{})
	sent := tap.Texts()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 10 {
				if err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return count(ctx, db) }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	var n, packets int
	dbtest.OK(t, db.QueryRow(read).Scan(&n))
	for _, text := range sent() {
		if strings.HasPrefix(text, "COMMIT; SELECT "+kinds.Untimed+"1; SELECT ") {
			packets++
		}
	}
	if n != 80 || packets == 0 {
		t.Errorf("80 callers have counted to %d, by %d texts of several statements", n, packets)
	}
}
