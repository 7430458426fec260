package inspect

import (
	"context"
	"database/sql/driver"
	"time"
)

// Clean removes rows of the lock table, of all namespaces, that have had no lease
// and were not made for longer than unused: at most limit of them, and at most 500.
// Tokens stay as high as they are. It waits for nobody, and leaves rows that
// somebody has locked. It needs DELETE on the table, beside SELECT and UPDATE; and
// MariaDB 10.6, or MySQL.
func (i *Inspector) Clean(ctx context.Context, unused time.Duration, limit int) (removed int, err error) {
	err = i.on(ctx, func(ctx context.Context, s *session) error {
		return s.onDriver(func(conn driver.Conn) (err error) {
			removed, err = s.table.Clean(ctx, conn, unused, limit)
			return err
		})
	})
	return removed, err
}
