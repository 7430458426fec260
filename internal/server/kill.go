package server

import (
	"cmp"
	"context"
	"database/sql/driver"
	"time"
)

// ClientPort is an SQL expression for the port from which the client of a row of [Connections] has
// connected; without a port it is of no use.
const ClientPort = "SUBSTRING_INDEX(HOST, ':', -1)"

// client is the account and machine of the client.
const client = "USER, IF(LOCATE(':', HOST) > 0, LEFT(HOST, CHAR_LENGTH(HOST) - CHAR_LENGTH(" + ClientPort + ")), HOST)"

// SameClient is the condition for a row of [Connections] that it has the same account and machine as
// the connection that asks, and that also is true for the latter. For TRUE:
//
//	(USER, IF(LOCATE(':', HOST) > 0, LEFT(HOST, CHAR_LENGTH(HOST) - CHAR_LENGTH(SUBSTRING_INDEX(HOST, ':', -1))), HOST))
//	  = (SELECT USER, IF(LOCATE(':', HOST) > 0, LEFT(HOST, CHAR_LENGTH(HOST) - CHAR_LENGTH(SUBSTRING_INDEX(HOST, ':', -1))), HOST)
//	    FROM (SELECT ID, USER, HOST, … information_schema.PROCESSLIST …) p WHERE ID = CONNECTION_ID() AND TRUE)
func SameClient(also string) string {
	return "(" + client + ") = (SELECT " + client + " FROM " + Connections + " WHERE ID = CONNECTION_ID() AND " + also + ")"
}

// OtherIDs is a query for the ids of the connections for which condition is true, without the one that
// asks.
//
//	SELECT ID FROM (SELECT ID, USER, HOST, … information_schema.PROCESSLIST …) p WHERE HOST = 'web1:4711' AND ID <> CONNECTION_ID()
func OtherIDs(condition string) string {
	return "SELECT ID FROM " + Connections + " WHERE " + condition + " AND ID <> CONNECTION_ID()"
}

// killPause is between two KILLs. In MariaDB, a KILL that meets a statement in SLEEP while another
// one is waking up takes 2 seconds, in which every SLEEP of the server stands still.
const killPause = time.Millisecond

// Kill sends verb, KILL QUERY or KILL CONNECTION, from conn to the connections whose ids the query ids
// returns, if any. sent reports that there was one.
func Kill(ctx context.Context, conn driver.Conn, verb, ids string) (sent bool, err error) {
	rows, err := QueryConnections(ctx, conn, ids)
	for i, row := range rows {
		if i > 0 {
			time.Sleep(killPause)
		}
		this := Exec(ctx, conn, verb+" "+row[0])
		if Number(this) == NoSuchThread {
			continue
		}
		sent = true
		if err = cmp.Or(err, this); Number(this) == 0 && this != nil {
			break
		}
	}
	return sent, err
}
