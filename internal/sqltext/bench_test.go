package sqltext

import (
	"strings"
	"testing"
)

var common = []struct{ name, query string }{
	{"select", "SELECT `id`, `name`, `price`, stock FROM `products` WHERE `products`.`id` = ? ORDER BY `id` LIMIT 1"}, // 100 bytes
	{"forupdate", "SELECT id, name, price, stock FROM products WHERE products.shop = 'Kiosk' AND id = ? LIMIT 1 FOR UPDATE"},
	{"join", "SELECT p.id, COUNT(*) FROM products p JOIN orders o ON o.product_id = p.id WHERE p.id IN (?,?,?) " +
		"AND o.paid_at > '2026-01-01 00:00:00' GROUP BY p.id HAVING COUNT(*) > 1 ORDER BY 2 DESC LIMIT 10 OFFSET 20"},
	{"insert", "INSERT INTO `products` (`created_at`,`name`,`price`,`stock`) VALUES (?,?,?,?)"},
	{"update", "UPDATE `products` SET `stock`=?,`updated_at`=? WHERE `id` = ?"},
	{"commit", "COMMIT"},
	{"set", "SET SESSION sql_mode = 'ANSI'"},
	{"escaped", `INSERT INTO notes (text) VALUES ('it\'s one that has to be read three times')`},
	{"conditional", "SELECT /*!40001 SQL_NO_CACHE */ * FROM t"},
	{"long", "INSERT INTO blobs VALUES ('" + strings.Repeat("0123456789abcdef", 4096) + "')"},
}

func BenchmarkLook(b *testing.B) {
	for _, c := range common {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.query)))
			b.ReportAllocs()
			for b.Loop() {
				Look(c.query)
			}
		})
	}
}

func TestALookAtAStatementAllocatesNothing(t *testing.T) {
	for _, c := range common {
		if n := testing.AllocsPerRun(100, func() { Look(c.query) }); n != 0 {
			t.Errorf("%s: %v allocations", c.name, n)
		}
	}
}
