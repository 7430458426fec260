package schema

import (
	"context"
	"database/sql/driver"
	"fmt"
	"regexp"
	"strings"

	"github.com/mysqllock/mysqllock/internal/server"
)

// oldProcedure is the end of the name of a procedure that an earlier version made on MySQL, behind the name of the lock
// table; its digit was the procedure's version. Programs of this version call none. One of an earlier version goes
// another way, by more statements, if a procedure is missing or another one has its name.
var oldProcedure = regexp.MustCompile(`^_(begin|pass1|(lock|wait|seen)[12]|(done|give|held|next)[123]|(named|take)1)$`)

// oldComment is the comment of those procedures. A procedure with the same name and another comment belongs to someone
// else.
var oldComment = regexp.MustCompile(`^mysqllock( [0-9]+)?$`)

// OldProcedures returns the quoted names of the procedures of earlier versions that the account may see: it has EXECUTE
// or ALTER ROUTINE on them, or has made them.
func (t Table) OldProcedures(ctx context.Context, conn driver.Conn) (names []string, err error) {
	rows, err := server.Query(ctx, conn, "SELECT ROUTINE_NAME, ROUTINE_COMMENT FROM information_schema.ROUTINES"+
		" WHERE ROUTINE_TYPE = 'PROCEDURE' AND ROUTINE_SCHEMA = "+Literal(t.schema)+" ORDER BY ROUTINE_NAME")
	for _, r := range rows {
		if end, ok := strings.CutPrefix(r[0], t.name); ok && oldProcedure.MatchString(end) && oldComment.MatchString(r[1]) {
			names = append(names, t.quoted(r[0]))
		}
	}
	return names, err
}

// DropProcedures drops the [Table.OldProcedures], and returns those that it has dropped, also with an error. The connection
// must have no open transaction, since DDL would commit it.
func (t Table) DropProcedures(ctx context.Context, conn driver.Conn) (dropped []string, err error) {
	names, err := t.OldProcedures(ctx, conn)
	if err != nil {
		return nil, fmt.Errorf("looking for procedures of earlier versions: %w", err)
	}
	for _, name := range names {
		// Members of a group repeat the DDL of the others, and one that cannot leaves the group.
		err := server.Exec(ctx, conn, "DROP PROCEDURE IF EXISTS "+name)
		switch {
		case server.Denied(err):
			return dropped, fmt.Errorf("dropping procedures of earlier versions: %w; the account needs ALTER ROUTINE,"+
				" and on MySQL SYSTEM_USER if the account that made them has it", err)
		case server.Locked(err):
			return dropped, fmt.Errorf("dropping procedures of earlier versions: %w; a program uses them, so try again", err)
		case err != nil:
			return dropped, fmt.Errorf("dropping procedures of earlier versions: %w", err)
		}
		dropped = append(dropped, name)
	}
	return dropped, nil
}
