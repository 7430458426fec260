package gormshop

import (
	"strings"
	"testing"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// testAudit audits one locked transaction: its statements come in order, those of the lock
// marked, the shop's not.
func testAudit(t *testing.T, shop *testshop.Shop) {
	audit := new(Audit)
	db, err := OpenAudited(shop.LockDSN(), audit, &gorm.Config{Logger: logger.Discard})
	check(t, err)
	closeLater(t, db)
	shop.Restock(t, 2)
	check(t, Sell(t.Context(), db, 1, "Ann")) // the first one also makes the lock table
	audit.Lines()
	check(t, Sell(t.Context(), db, 1, "Bob"))
	lines := audit.Lines()
	shop.Want(t, 0, 2)

	rest := lines
	for _, want := range []string{"[lock: take row product:1] ", "[shop] SELECT ", "[shop] UPDATE ", "[shop] INSERT ", "COMMIT"} {
		for len(rest) > 0 && !strings.Contains(rest[0], want) {
			rest = rest[1:]
		}
		if len(rest) == 0 {
			t.Fatalf("%q is missing, or not in its place, in\n%s", want, strings.Join(lines, "\n"))
		}
	}
	for _, line := range lines {
		if ours := strings.Contains(line, "mysqllock"); ours && !strings.HasPrefix(line, "[lock: ") {
			t.Errorf("a statement of the lock is not marked: %s", line)
		}
	}
	t.Log("\n" + strings.Join(lines, "\n"))
}
