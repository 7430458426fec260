package server

import (
	"context"
	"database/sql/driver"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Connections are the connections of the server that the account may see, with what they run, for
// FROM. The columns are some of information_schema.PROCESSLIST, with its alias p. MySQL builds that
// table whole, in utf8mb3: while any connection runs a text that is not, each read of it fails with
// the error of [Unlisted]. performance_schema has the same list for every account. It is empty if
// performance_schema is off, and older servers do not have it; then there is only information_schema.
// INFO has the first 1,024 bytes of the text there, and 65,535 on MariaDB, so what is looked for
// stands in front. On MySQL from 8.0.22 on:
//
//	(SELECT ID, USER, HOST, COMMAND, TIME, STATE, INFO FROM performance_schema.processlist
//	  UNION ALL SELECT ID, USER, HOST, COMMAND, TIME, STATE, INFO FROM information_schema.PROCESSLIST WHERE NOT @@performance_schema) p
//
// On MariaDB:
//
//	(SELECT ID, USER, HOST, COMMAND, TIME, STATE, INFO, TIME_MS, QUERY_ID FROM information_schema.PROCESSLIST) p
const Connections = "(SELECT " + listed + " /*M!100000 , TIME_MS, QUERY_ID */ FROM /*!80022 performance_schema.processlist" +
	" UNION ALL SELECT " + listed +
	" FROM */ information_schema.PROCESSLIST /*!80022 WHERE NOT @@performance_schema */) p"

const listed = "ID, USER, HOST, COMMAND, TIME, STATE, INFO"

// ProgramOf is an SQL expression for the name of the program at the other end of a connection, as it
// says itself, on a server with Attributes.
//
//	(SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a WHERE a.PROCESSLIST_ID = h.id
//	  AND a.ATTR_NAME IN ('mysqllock_owner', 'program_name') ORDER BY a.ATTR_NAME LIMIT 1)
func ProgramOf(id string) string {
	return "(SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a WHERE a.PROCESSLIST_ID = " + id +
		" AND a.ATTR_NAME IN ('mysqllock_owner', 'program_name') ORDER BY a.ATTR_NAME LIMIT 1)"
}

// Unlisted reports that [Connections] cannot be read at present, because of what a connection
// runs.
func Unlisted(err error) bool { return Number(err) == unconvertible }

// QueryConnections is [Query] for a text with [Connections]. If these cannot be read at present, it
// takes them from SHOW PROCESSLIST, which has the first 100 characters of each text, whatever they
// are.
func QueryConnections(ctx context.Context, conn driver.Conn, text string) ([][]string, error) {
	rows, err := Query(ctx, conn, text)
	if !Unlisted(err) {
		return rows, err
	}
	all, err := Query(ctx, conn, "SHOW PROCESSLIST")
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, row := range all { // Id, User, Host, db, Command, Time, State, Info
		line := "ROW(" + row[0]
		for _, i := range []int{1, 2, 4, 5, 6, 7} {
			line += fmt.Sprintf(", CONVERT(x'%x' USING utf8mb4)", row[i])
		}
		lines = append(lines, line+")")
	}
	return Query(ctx, conn, strings.ReplaceAll(text, Connections, "(VALUES "+strings.Join(lines, ", ")+") p ("+listed+")"))
}

// Waits says, for a comment in a statement that waits, for how long its caller has waited when
// the statement is sent. With the age of the statement, which the server tells, that is since
// when the caller waits, whatever the clocks of both hosts say.
func Waits(since time.Time) string {
	return fmt.Sprintf("waits %d ms", time.Since(since).Milliseconds())
}

// ReadWaits reads from a statement's text what Waits has said. ok is false if that says nothing.
func ReadWaits(text string) (d time.Duration, ok bool) {
	_, text, _ = strings.Cut(text, "/* mysqllock ")
	text, _, whole := strings.Cut(text, " ms */")
	_, number, said := strings.Cut(" "+text, " waits ")
	n, err := strconv.ParseUint(number, 10, 40)
	return time.Duration(n) * time.Millisecond, whole && said && err == nil
}
