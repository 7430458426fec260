package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTextTransactions: after texts that leave nothing open a hint is good on the
// connection, and after others it is refused, until what they left open has ended.
func TestTextTransactions(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE opens() BEGIN START TRANSACTION; UPDATE p SET stock = stock WHERE id = 4; END")
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE switches() SET autocommit = 0")
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE commits() BEGIN START TRANSACTION; UPDATE p SET stock = stock WHERE id = 4; COMMIT; END")
		cfg := s.Config()
		cfg.MultiStatements = true
		cfg.InterpolateParams = true
		k, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
		dbtest.OK(t, err)
		db := sql.OpenDB(k)
		t.Cleanup(func() { db.Close() })
		for _, c := range []struct {
			texts []string // separate ones; what the server refuses is part of the test
			open  bool     // something is open in the end
		}{
			{texts: []string{"BEGIN; UPDATE p SET stock = stock WHERE id = 4; COMMIT"}},
			{texts: []string{"START TRANSACTION; SELECT 1; ROLLBACK"}},
			{texts: []string{"BEGIN", "/* c */ COMMIT"}},
			{texts: []string{"BEGIN", "-- c\nROLLBACK"}},
			{texts: []string{"/*!50000 BEGIN */", "/*!50000 COMMIT */"}},
			{texts: []string{"BEGIN", "COMMIT;"}},
			{texts: []string{"BEGIN", "CREATE TABLE IF NOT EXISTS made (id INT)"}},
			{texts: []string{"BEGIN", "LOCK TABLES p WRITE", "UNLOCK TABLES"}},
			{texts: []string{"XA START 'x'", "XA END 'x'", "XA COMMIT 'x' ONE PHASE"}},
			{texts: []string{"XA START 'x'; XA END 'x'; XA ROLLBACK 'x'"}},
			{texts: []string{"SET autocommit = 0", "UPDATE p SET stock = stock WHERE id = 4", "/* c */ SET autocommit = 1"}},
			{texts: []string{"SET @@session.autocommit = 0; SET @@session.autocommit = 1"}},
			{texts: []string{"SET GLOBAL max_connections = @@max_connections"}},
			{texts: []string{"BEGIN; SELECT frob", "ROLLBACK"}},
			{texts: []string{"SELECT frob; BEGIN"}},
			{texts: []string{"BEGIN", "KILL QUERY CONNECTION_ID()", "COMMIT AND CHAIN", "COMMIT"}},
			{texts: []string{"CALL commits()"}},
			{texts: []string{"CALL opens()", "COMMIT"}},
			{texts: []string{"PREPARE b FROM 'UPDATE p SET stock = stock WHERE id = 4'", "EXECUTE b"}},

			{texts: []string{"/* c */ BEGIN"}, open: true},
			{texts: []string{"SELECT 1; BEGIN"}, open: true},
			{texts: []string{"BEGIN; COMMIT; BEGIN"}, open: true},
			{texts: []string{"BEGIN; SELECT frob"}, open: true},
			{texts: []string{"BEGIN", "COMMIT AND CHAIN"}, open: true},
			{texts: []string{"ROLLBACK AND CHAIN"}, open: true},
			{texts: []string{"START TRANSACTION WITH CONSISTENT SNAPSHOT"}, open: true},
			{texts: []string{"/*!50000 START TRANSACTION */"}, open: true},
			{texts: []string{"XA START 'x'"}, open: true},
			{texts: []string{"XA START 'x'", "XA END 'x'"}, open: true},
			{texts: []string{"/* c */ SET autocommit = 0"}, open: true},
			{texts: []string{"SET @@session.autocommit = OFF"}, open: true},
			{texts: []string{"SET @@session . `autocommit` := 0"}, open: true},
			{texts: []string{"SET @x = 1, autocommit = 0"}, open: true},
			{texts: []string{"SET @x = 1, autocommit = 0, @y = 2", "COMMIT"}, open: true},
			{texts: []string{"SET autocommit = 'OFF'"}, open: true},
			{texts: []string{"SET autocommit = 1 - 1"}, open: true},
			{texts: []string{"/*!40101 SET autocommit = 0 */"}, open: true},
			{texts: []string{"SET GLOBAL max_connections = @@max_connections, @@autocommit = 0"}, open: true},
			{texts: []string{"BEGIN", "ROLLBACK TO SAVEPOINT nothing"}, open: true},
			{texts: []string{"CALL opens()"}, open: true},
			{texts: []string{"CALL switches()"}, open: true},
			{texts: []string{"PREPARE b FROM 'SET autocommit = 0'", "EXECUTE b"}, open: true},
		} {
			name := strings.Join(c.texts, " | ")
			for _, prepared := range []bool{false, true} {
				conn, err := db.Conn(dbtest.Limited(t))
				dbtest.OK(t, err)
				for _, text := range c.texts {
					if !prepared || strings.Contains(text, ";") {
						_, _ = conn.ExecContext(dbtest.Limited(t), text)
					} else if st, err := conn.PrepareContext(dbtest.Limited(t), text); err != nil {
						_, _ = conn.ExecContext(dbtest.Limited(t), text)
					} else {
						_, _ = st.ExecContext(dbtest.Limited(t))
						dbtest.OK(t, st.Close())
					}
				}
				s.wantHints(t, conn, name, c.open)
				if c.open {
					for _, text := range []string{"XA END 'x'", "XA ROLLBACK 'x'", "ROLLBACK", "SET autocommit = 1"} {
						_, _ = conn.ExecContext(dbtest.Limited(t), text)
					}
					s.wantHints(t, conn, name+", ended", false)
				}
				dbtest.OK(t, conn.Close())
				dbtest.Exec(t, s.plain, "DROP TABLE IF EXISTS made")
			}
		}
	})
}

// wantHints tries hints of each kind on a connection.
func (s *scratch) wantHints(t *testing.T, conn *sql.Conn, name string, refused bool) {
	t.Helper()
	for _, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(10 * time.Second), lockctx.Advisory(), lockctx.Optimistic()} {
		ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "k", option))
		_, err := conn.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1")
		if errors.Is(err, mysqllock.ErrUnsafe) != refused || !refused && err != nil {
			t.Errorf("%s: UPDATE: %v", name, err)
		}
		cancel()
		ctx, cancel = context.WithCancel(lockctx.With(dbtest.Limited(t), "k", option))
		tx, err := conn.BeginTx(ctx, nil)
		if errors.Is(err, mysqllock.ErrUnsafe) != refused || !refused && err != nil {
			t.Errorf("%s: BeginTx: %v", name, err)
		}
		if err == nil {
			dbtest.OK(t, tx.Rollback())
		}
		cancel()
	}
}

// TestTextTransactionInside: texts in a transaction of BeginTx's outlive it as far as
// they do.
func TestTextTransactionInside(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for texts, open := range map[string]bool{
			"SET autocommit = 0":                           true,
			"COMMIT|BEGIN":                                 false, // which the end of the sql.Tx ends
			"COMMIT":                                       false,
			"COMMIT AND CHAIN":                             false,
			"SET autocommit = 0|SET autocommit = 1":        false,
			"CREATE TABLE IF NOT EXISTS made (a INT)":      false,
			"UPDATE p SET stock = stock|/* */ COMMIT|DO 1": false,
		} {
			conn, err := db.Conn(dbtest.Limited(t))
			dbtest.OK(t, err)
			tx, err := conn.BeginTx(dbtest.Limited(t), nil)
			dbtest.OK(t, err)
			for text := range strings.SplitSeq(texts, "|") {
				dbtest.Exec(t, tx, text)
			}
			dbtest.OK(t, tx.Commit())
			s.wantHints(t, conn, texts, open)
			dbtest.Exec(t, conn, "SET autocommit = 1")
			s.wantHints(t, conn, texts+", ended", false)
			dbtest.OK(t, conn.Close())
		}
	})
}

// TestTextsSendNothing: what is noted of unhinted texts sends nothing, and where
// nothing is in doubt a hint costs what it costs.
func TestTextsSendNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tp := s.tapped(mysqllock.Config{})
		db.SetMaxOpenConns(1)
		ctx := lockctx.With(dbtest.Limited(t), "k")
		hinted := func() error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1")
			return err
		}
		dbtest.OK(t, hinted())
		texts := []string{
			"BEGIN", "SELECT 1", "COMMIT", "SET autocommit = 0", "SET autocommit = 1", "CREATE TABLE made (a INT)", "BEGIN", "ROLLBACK",
			"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", "LOCK TABLES p WRITE", "UNLOCK TABLES", "DROP TABLE made",
		}
		seen := tp.Since()
		for _, text := range texts {
			dbtest.Exec(t, db, text)
		}
		var sent []string
		for _, c := range seen() {
			if c.Text != "[ping]" && !slices.Contains([]string{"SET SESSION idle_transaction_timeout = 0"}, c.Text) {
				sent = append(sent, c.Text)
			}
		}
		if len(sent) > len(texts)+1 { // MariaDB: the limit for locked transactions is taken off
			t.Errorf("sent %q", sent)
		}
		seen = tp.Since()
		dbtest.OK(t, hinted())
		for _, c := range seen() {
			if strings.Contains(c.Text, "@@autocommit") || strings.Contains(c.Text, "mysqllock_open") {
				t.Errorf("asked: %q", c.Text)
			}
		}
	})
}
