package main

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// listen returns the statements that the server gets while f runs, in order,
// other than ours. It switches the server's general log on and off again.
func listen(ctx context.Context, server *sql.DB, f func() error) (statements []string, err error) {
	conn, err := server.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	exec := func(texts ...string) error {
		for _, text := range texts {
			if _, err := conn.ExecContext(ctx, text); err != nil {
				return fmt.Errorf("%s: %w", text, err)
			}
		}
		return nil
	}
	if err := exec("SET GLOBAL log_output = 'TABLE'", "TRUNCATE TABLE mysql.general_log", "SET GLOBAL general_log = ON"); err != nil {
		return nil, err
	}
	ferr := f()
	if err := exec("SET GLOBAL general_log = OFF"); err != nil {
		return nil, err
	}
	if ferr != nil {
		return nil, ferr
	}
	// "Execute" is a prepared statement with its arguments filled in.
	rows, err := conn.QueryContext(ctx, "SELECT argument FROM mysql.general_log"+
		" WHERE thread_id <> CONNECTION_ID() AND command_type IN ('Query', 'Execute') ORDER BY event_time")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var text string
		if err := rows.Scan(&text); err != nil {
			return nil, err
		}
		statements = append(statements, text)
	}
	return statements, rows.Err()
}

// compare puts "+ " before what only with has, "- " before what only without
// has and "  " before what both have, keeping the order of both.
func compare(without, with []string) (lines []string) {
	for len(without) > 0 || len(with) > 0 {
		switch {
		case len(with) > 0 && !slices.Contains(without, with[0]):
			lines, with = append(lines, "+ "+with[0]), with[1:]
		case len(without) > 0 && !slices.Contains(with, without[0]):
			lines, without = append(lines, "- "+without[0]), without[1:]
		case len(with) > 0 && len(without) > 0 && with[0] == without[0]:
			lines, with, without = append(lines, "  "+with[0]), with[1:], without[1:]
		case len(with) > 0: // both have it, elsewhere
			lines, with = append(lines, "+ "+with[0]), with[1:]
		default:
			lines, without = append(lines, "- "+without[0]), without[1:]
		}
	}
	return lines
}

var hexLiteral = regexp.MustCompile(`x'([0-9a-fA-F]*)'`)

// readable says what the hexadecimal literals of a statement stand for, as a
// comment; "" where there is none.
func readable(statement string) string {
	var parts []string
	for _, m := range hexLiteral.FindAllStringSubmatch(statement, -1) {
		if text, err := hex.DecodeString(m[1]); err == nil {
			parts = append(parts, fmt.Sprintf("%s is %q", m[0], text))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "-- " + strings.Join(parts, ", ")
}
