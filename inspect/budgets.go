package inspect

import (
	"context"
	"fmt"
	"strconv"
	"strings"
)

// budgets is what the connections of a server say of maxConns.
type budgets struct {
	handles, sum int      // handles with maxConns, and what they may open together
	conns        int      // connections of these
	unbounded    int      // connections of handles without maxConns
	owners       []string // which programs have them
}

// read counts connections. Each row is about those of a handle with maxConns, or of a program
// without: what they say of maxConns, which program it is, and how many they are.
func (b *budgets) read(rows [][]string) {
	for _, r := range rows {
		n, _ := strconv.Atoi(r[2])
		number, _, _ := strings.Cut(r[0], " of ")
		most, err := strconv.Atoi(number)
		if err != nil {
			b.unbounded += n
			b.owners = append(b.owners, r[1])
			continue
		}
		b.conns += n
		b.handles++
		b.sum += most
	}
}

// budgets compares what all handles that are connected may open with what the server takes.
func (e *examination) budgets(ctx context.Context) error {
	const name, addUp = "maxConns", "add up maxConns of all processes, and compare it with max_connections"
	most, used, err := e.room(ctx)
	if err != nil {
		return err
	}
	server := fmt.Sprintf("max_connections is %d", most)
	if !e.schema {
		e.add(name, Note, "unknown: performance_schema is off, so the server does not show what handles may open; "+server, turnOn+"; or "+addUp)
		return nil
	}
	rows, err := e.query(ctx, "SELECT @@performance_schema_session_connect_attrs_size")
	if err != nil {
		return err
	}
	if rows[0][0] == "0" {
		e.add(name, Note, "unknown: performance_schema_session_connect_attrs_size is 0,"+
			" so the server does not show what handles may open; "+server,
			"a larger performance_schema_session_connect_attrs_size; or "+addUp)
		return nil
	}
	read := func(table string) ([][]string, error) {
		return e.query(ctx, fmt.Sprintf("SELECT budget, owner, COUNT(*) FROM"+
			" (SELECT MAX(IF(ATTR_NAME = 'mysqllock_budget', ATTR_VALUE, NULL)) budget,"+
			" MAX(IF(ATTR_NAME = 'mysqllock_owner', ATTR_VALUE, NULL)) owner FROM performance_schema.%s"+
			" WHERE ATTR_NAME IN ('mysqllock_budget', 'mysqllock_owner') AND PROCESSLIST_ID <> CONNECTION_ID() GROUP BY PROCESSLIST_ID) c"+
			" GROUP BY budget, owner ORDER BY owner LIMIT %d", table, 10*most))
	}
	whose, remedy := "", ""
	rows, err = read("session_connect_attrs")
	if hidden(err) {
		whose, remedy = " of this account", e.grant("SELECT", "performance_schema.*")
		rows, err = read("session_account_connect_attrs")
	}
	if hidden(err) {
		e.add(name, Note, "unknown: the account may not read performance_schema, which shows what handles may open; "+server,
			remedy+"; or "+addUp)
		return nil
	}
	if err != nil {
		return err
	}
	var b budgets
	b.read(rows)
	state, detail := b.judge(most, used, whose)
	switch {
	case state == Warning:
		remedy = strings.TrimPrefix(remedy+"; ", "; ") + "a larger max_connections, or a smaller maxConns"
	case whose != "" && state == OK:
		state = Note
	}
	e.add(name, state, detail, remedy)
	return nil
}

// judge compares the budgets with what the server takes. Of whose handles they are is ""
// for all.
func (b *budgets) judge(most, used int, whose string) (State, string) {
	state := OK
	detail := "no handle" + whose + " with maxConns is connected now"
	if b.handles > 0 {
		detail = fmt.Sprintf("handles%s that are connected now: %d, which may open %d connections together,"+
			" of the %d that the server takes", whose, b.handles, b.sum, most)
	}
	others := used - b.conns - b.unbounded - 1 // the one that asks
	if others > 0 {
		detail += fmt.Sprintf("; connections of others, and of handles that do not say it (Wrap): %d", others)
	}
	if b.sum+b.unbounded+max(others, 0) > most {
		state = Warning
	}
	if b.unbounded > 0 {
		shown := b.owners
		if len(shown) > 3 {
			shown = append(shown[:3:3], fmt.Sprintf("%d more", len(b.owners)-3))
		}
		detail += fmt.Sprintf("; connections of handles without maxConns, which may open an unknown number:"+
			" %d, by %s", b.unbounded, strings.Join(shown, ", "))
		if state == OK {
			state = Note
		}
	}
	if whose != "" {
		detail += "; what handles of other accounts may open is unknown"
	}
	return state, detail
}
