package inspect

import (
	"context"
	"errors"
	"fmt"
	"strconv"
)

// This is for servers that show the transactions of all nodes, and which tables each has used, but
// not which rows it has locked.

const (
	onlyTables = "the server does not show who has locked a row, but only which transactions have used the table"
	polling    = "who waits for leases and slots"
)

var usedTables = view{
	rowLocks: (*picture).usersOfTable, namedLocks: func(*picture, context.Context) error { return nil },
	deadlocks: func(p *picture, _ context.Context) ([][]string, error) {
		p.gap(deadlocks, "it does not count them", "")
		return nil, nil
	},
	activity: (*picture).mysqlActivity, connections: "information_schema.CLUSTER_PROCESSLIST",
}

// usersOfTable notes the transactions that have used the lock table, and who waits for its rows. One
// that waits, and has locked or changed nothing yet, has locked none of them.
func (p *picture) usersOfTable(ctx context.Context) error {
	rows, err := p.query(ctx, fmt.Sprintf("SELECT SESSION_ID, TIMESTAMPDIFF(MICROSECOND, START_TIME, NOW(6))"+
		" FROM information_schema.CLUSTER_TIDB_TRX"+
		" WHERE SESSION_ID <> CONNECTION_ID() AND FIND_IN_SET((SELECT TIDB_TABLE_ID FROM information_schema.TABLES WHERE %s), RELATED_TABLE_IDS)"+
		" AND NOT (STATE = 'LockWaiting' AND MEM_BUFFER_KEYS = 0)"+
		" LIMIT %d", p.table.Where("TABLE_SCHEMA", "TABLE_NAME"), most))
	if err == nil { // an account without PROCESS sees the waits of its own connections only, without an error
		_, err = p.query(ctx, "SELECT 1 FROM information_schema.DATA_LOCK_WAITS LIMIT 1")
	}
	if err := p.tolerate(err, whoAny, p.grant("PROCESS", "*.*")); err != nil {
		return err
	}
	if err != nil { // others may hold what these seem to
		rows = nil
	}
	p.full(rows, whoRows)
	for _, r := range rows {
		conn, _ := strconv.ParseUint(r[0], 10, 64)
		p.hiding = append(p.hiding, transaction{conn: conn, age: p.age(r[1])})
	}
	if len(p.hiding) > 0 {
		p.gap(calmRows, fmt.Sprintf("%s: %d", onlyTables, len(p.hiding)), "Filter.Try, or mysqllock ls --try")
	}
	if err == nil {
		p.unseen = Value(len(p.hiding))
	}
	p.gap(polling, "they ask again and again", "")
	return p.waitersByText(ctx)
}

// notKilled is the error for a holder whose connection is not ended, since the server does not take
// that well.
func (s *session) notKilled(ctx context.Context, conn uint64) error {
	at := "whose server is not known"
	rows, err := s.query(ctx, fmt.Sprintf("SELECT INSTANCE FROM information_schema.CLUSTER_PROCESSLIST WHERE ID = %d", conn))
	switch {
	case err != nil:
	case len(rows) > 0:
		at = "at the server " + rows[0][0]
	default:
		at = "which is at no server any more"
	}
	return errors.Join(err, fmt.Errorf("mysqllock: nothing was released: a KILL of an idle transaction can crash %s (issue 63956 of TiDB); "+
		"end the program of the connection %d, %s, or wait: a holder that is silent loses its lock after its lockTTL", s.info.Engine, conn, at))
}
