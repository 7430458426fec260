package schema_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// firstForm is the table as it was before there were leases, with rows.
func (s *scratch) firstForm() {
	s.T.Helper()
	c := s.open()
	s.Exec(c, "CREATE TABLE "+s.table.String()+" (namespace VARBINARY(255) NOT NULL, name VARBINARY(255) NOT NULL, PRIMARY KEY (namespace, name)) ENGINE=InnoDB")
	s.Exec(c, "INSERT INTO "+s.table.String()+" VALUES ('app', 'a'), ('app', 'b')")
}

func (s *scratch) wantForm(rows string) {
	s.T.Helper()
	c := s.open()
	columns := s.One(c, "SELECT GROUP_CONCAT(CONCAT(COLUMN_NAME, ' ', COLUMN_TYPE, ' ', IS_NULLABLE) ORDER BY ORDINAL_POSITION)"+
		" FROM information_schema.COLUMNS WHERE "+s.table.Where("TABLE_SCHEMA", "TABLE_NAME"))
	columns = strings.NewReplacer("bigint(20)", "bigint", "tinyint(3)", "tinyint").Replace(columns)
	want := "namespace varbinary(255) NO,name varbinary(255) NO,owner varbinary(255) YES,token bigint unsigned NO,expires datetime(6) NO,versioned tinyint unsigned NO"
	if rows != upgradedRows { // an older table gets the rest by Complete alone
		want += ",granted_at datetime(6) YES,ttl bigint unsigned YES,renewed_token bigint unsigned YES,released varbinary(2000) YES"
	}
	if columns != want {
		s.T.Errorf("the columns are %s, want %s", columns, want)
	}
	got := s.One(c, "SELECT COALESCE(GROUP_CONCAT(CONCAT_WS(' ', namespace, name, owner, token, expires, versioned) ORDER BY name), '') FROM "+s.table.String())
	if got != rows {
		s.T.Errorf("the rows are %q, want %q", got, rows)
	}
}

const (
	highWaterRow = "  0 1970-01-01 00:00:00.000000 0"
	upgradedRows = highWaterRow + ",app a 0 1970-01-01 00:00:00.000000 0,app b 0 1970-01-01 00:00:00.000000 0"
)

func TestEnsure(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		for range 2 {
			procedure, err := s.table.Ensure(t.Context(), c, s.info, true)
			dbtest.OK(t, err)
			if procedure == s.info.MariaDB {
				t.Errorf("procedure %v", procedure)
			}
			s.wantForm(highWaterRow)
		}
		s.Exec(c, "DELETE FROM "+s.table.String())
		_, err := s.table.Ensure(t.Context(), c, s.info, false)
		dbtest.OK(t, err)
		s.wantForm(highWaterRow)
	})
}

func TestUpgrade(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.firstForm()
		c := s.open()
		for range 2 {
			_, err := s.table.Ensure(t.Context(), c, s.info, true)
			dbtest.OK(t, err)
			s.wantForm(upgradedRows)
		}
		// What is there already is left alone.
		s.Exec(c, "ALTER TABLE "+s.table.String()+" DROP COLUMN owner")
		_, err := s.table.Ensure(t.Context(), c, s.info, true)
		dbtest.OK(t, err)
	})
}

func TestUpgradeTogether(t *testing.T) {
	for _, from := range []string{"nothing", "first form"} {
		t.Run(from, func(t *testing.T) {
			dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
				want := highWaterRow
				if from == "first form" {
					s.firstForm()
					want = upgradedRows
				}
				var all sync.WaitGroup
				start := make(chan struct{})
				for range 8 {
					c := s.open()
					all.Go(func() {
						<-start
						if _, err := s.table.Ensure(dbtest.Limited(t), c, s.info, true); err != nil {
							t.Error(err)
						}
					})
				}
				close(start)
				all.Wait()
				s.wantForm(want)
			})
		})
	}
}

// TestByHand runs what the errors say, with the rights that they ask for.
func TestByHand(t *testing.T) {
	for _, from := range []string{"nothing", "first form"} {
		t.Run(from, func(t *testing.T) {
			dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
				root := s.open()
				user := "u_" + s.Name[len(s.Name)-8:]
				s.Exec(root, "CREATE USER '"+user+"'@'%'")
				s.Exec(root, "GRANT SELECT, INSERT, UPDATE ON "+s.Name+".* TO '"+user+"'@'%'")
				want := highWaterRow
				if from == "first form" {
					s.firstForm()
					want = upgradedRows
				}
				c := s.Connect(dbtest.NoDatabase, dbtest.As(user))
				var advice []string
				for _, auto := range []bool{false, true} {
					_, err := s.table.Ensure(t.Context(), c, s.info, auto)
					if err == nil || server.Denied(err) != auto {
						t.Fatalf("auto %v: %v", auto, err)
					}
					_, run, _ := strings.Cut(err.Error(), ":\n")
					advice = append(advice, run)
				}
				if advice[0] != advice[1] {
					t.Errorf("manual says\n%s\nand denied says\n%s", advice[0], advice[1])
				}
				for text := range strings.SplitSeq(advice[0], ";\n") {
					s.Exec(root, text)
				}
				_, err := s.table.Ensure(t.Context(), c, s.info, false)
				dbtest.OK(t, err)
				s.wantForm(want)
			})
		})
	}
}

func TestNoInnoDB(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.Exec(c, strings.ReplaceAll(s.table.DDL(), "InnoDB", "MyISAM"))
		_, err := s.table.Ensure(t.Context(), c, s.info, true)
		if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "MyISAM") {
			t.Error(err)
		}
		s.Exec(c, "DROP TABLE "+s.table.String())
		s.Exec(c, "CREATE VIEW "+s.table.String()+" AS SELECT 1 AS name")
		_, err = s.table.Ensure(t.Context(), c, s.info, true)
		if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "view") {
			t.Error(err)
		}
	})
}

// TestProcedure: it tells of a lease, live or not, and leaves no transaction open then. What
// is quiet it answers without a result set.
func TestProcedure(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		if s.info.MariaDB {
			t.Skip("there the same is an anonymous block")
		}
		c, other := s.open(), s.open()
		procedure, err := s.table.Ensure(t.Context(), c, s.info, true)
		dbtest.OK(t, err)
		if !procedure {
			t.Fatal("the procedure was not made")
		}
		const anyToken = "18446744073709551615"
		call := "CALL " + s.table.LockProcedure().String() + "('app', 'k', FALSE, NULL, 0, 0, FALSE)"
		quiet := func(most string) string { return strings.Replace(call, "NULL", most, 1) }
		lock := "SELECT 1 FROM " + s.table.String() + " WHERE namespace = 'app' AND name = 'k' FOR UPDATE NOWAIT"
		locked := func() {
			t.Helper()
			if err := server.Exec(t.Context(), other, lock); !server.Locked(err) {
				t.Errorf("the row is not locked: %v", err)
			}
			s.Exec(c, "ROLLBACK")
		}
		for _, text := range []string{call, quiet("0"), quiet(anyToken)} {
			if rows := s.Query(c, text); rows == nil || len(rows) != 0 {
				t.Errorf("%s without a row: %q", text, rows)
			}
			s.Exec(c, "ROLLBACK")
		}
		s.Exec(c, "INSERT INTO "+s.table.String()+" (namespace, name, owner, token, expires) VALUES"+
			" ('app', 'k', 'x#00000000', 18446744073709551615, UTC_TIMESTAMP(6) + INTERVAL 1 HOUR)")

		for _, end := range []string{"expires", "UTC_TIMESTAMP(6)"} {
			s.Exec(other, "UPDATE "+s.table.String()+" SET expires = "+end+" WHERE name = 'k'")
			for _, text := range []string{call, quiet("0"), quiet(anyToken)} {
				row := s.Query(c, text)[0]
				if row[0] != s.One(c, "SELECT CONNECTION_ID()") || row[1] != anyToken || row[2] != "x#00000000" || row[4] != "0" || row[5] != "0" {
					t.Errorf("%s of a lease: %q", text, row)
				}
				s.Exec(other, lock) // nobody has it
			}
		}
		s.Exec(other, "UPDATE "+s.table.String()+" SET versioned = 1, owner = NULL")
		for _, text := range []string{call, quiet("0"), quiet(anyToken)} {
			if row := s.Query(c, text)[0]; row[1] != anyToken || row[2] != "" || row[3] != "1" {
				t.Errorf("%s of a lease that was given back: %q", text, row)
			}
			locked()
		}

		// What there is to tell, and how many tokens the caller knows.
		for _, test := range []struct {
			is, most string
			quiet    bool
		}{
			{"owner = NULL, versioned = 0, token = 0", "0", true},
			{"token = 7", "0", false},
			{"token = 7", "7", true},
			{"token = 7", anyToken, true},
			{"token = 7", "NULL", false},
			{"versioned = 1", anyToken, false},
		} {
			s.Exec(other, "UPDATE "+s.table.String()+" SET "+test.is+" WHERE name = 'k'")
			if rows := s.Query(c, quiet(test.most)); (rows == nil) != test.quiet || len(rows) == 1 == test.quiet {
				t.Errorf("%s, with %s known: %q", test.is, test.most, rows)
			}
			locked()
		}

		shared := strings.Replace(call, "FALSE", "TRUE", 1)
		s.Query(c, shared)
		s.Exec(other, strings.Replace(lock, "UPDATE", "SHARE", 1))
		if err := server.Exec(t.Context(), other, lock); !server.Locked(err) {
			t.Errorf("the row is not locked for others' writes: %v", err)
		}
	})
}

func TestLive(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.setup(c)
		s.Exec(c, "SET time_zone = '+05:30'")
		for _, test := range []struct{ owner, expires, want string }{
			{"'x'", "UTC_TIMESTAMP(6) + INTERVAL 90 SECOND", "1 1"},
			{"NULL", "UTC_TIMESTAMP(6) + INTERVAL 90 SECOND", "0 0"},
			{"'x'", "UTC_TIMESTAMP(6)", "0 0"},
			{"NULL", "UTC_TIMESTAMP(6)", "0 0"},
		} {
			s.Exec(c, "REPLACE INTO "+s.table.String()+" (namespace, name, owner, expires) VALUES ('app', 'k', "+test.owner+", "+test.expires+")")
			got := s.One(c, "SELECT CONCAT("+schema.Live("l.")+", ' ', "+schema.Remaining("l.")+" BETWEEN 1000000 AND 90000000) FROM "+s.table.String()+" l WHERE name = 'k'")
			if got != test.want {
				t.Errorf("owner %s, expires %s: %s, want %s", test.owner, test.expires, got, test.want)
			}
		}
	})
}

// TestEnsureWhileTheNameIsTaken: many make the table at once, and a server that is slow with
// it has the others wait for longer than they may. They try again.
func TestEnsureWhileTheNameIsTaken(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c, other := s.open(), s.open()
		s.Exec(c, "SET SESSION lock_wait_timeout = 1")
		made := make(chan error, 1)
		go func() { // and does not come off
			made <- server.Exec(t.Context(), other, "CREATE TABLE "+s.table.String()+" SELECT SLEEP(2.5) + (SELECT 1 UNION SELECT 2)")
		}()
		dbtest.Soon(t, "somebody makes it", func() bool {
			return len(made) > 0 || len(s.Query(c, "SELECT 1 FROM information_schema.PROCESSLIST WHERE INFO LIKE 'CREATE TABLE %"+s.Name+"%SLEEP%'")) > 0
		})
		_, err := s.table.Ensure(t.Context(), c, s.info, true)
		if err := <-made; err == nil {
			t.Error("somebody else has made it")
		}
		dbtest.OK(t, err)
		s.wantForm(highWaterRow)
	})
}
