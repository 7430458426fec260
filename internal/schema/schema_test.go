package schema_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// firstForm is the table as it was before there were leases, with rows.
func (s *scratch) firstForm() {
	s.t.Helper()
	c := s.open("")
	s.exec(c, "CREATE TABLE "+s.table.String()+" (namespace VARBINARY(255) NOT NULL, name VARBINARY(255) NOT NULL, PRIMARY KEY (namespace, name)) ENGINE=InnoDB")
	s.exec(c, "INSERT INTO "+s.table.String()+" VALUES ('app', 'a'), ('app', 'b')")
}

func (s *scratch) wantForm(rows string) {
	s.t.Helper()
	c := s.open("")
	columns := s.one(c, "SELECT GROUP_CONCAT(CONCAT(COLUMN_NAME, ' ', COLUMN_TYPE, ' ', IS_NULLABLE) ORDER BY ORDINAL_POSITION)"+
		" FROM information_schema.COLUMNS WHERE "+s.table.Where("TABLE_SCHEMA", "TABLE_NAME"))
	columns = strings.NewReplacer("bigint(20)", "bigint", "tinyint(3)", "tinyint").Replace(columns)
	if want := "namespace varbinary(255) NO,name varbinary(255) NO,owner varbinary(255) YES,token bigint unsigned NO,expires datetime(6) NO,versioned tinyint unsigned NO"; columns != want {
		s.t.Errorf("the columns are %s, want %s", columns, want)
	}
	got := s.one(c, "SELECT COALESCE(GROUP_CONCAT(CONCAT_WS(' ', namespace, name, owner, token, expires, versioned) ORDER BY name), '') FROM "+s.table.String())
	if got != rows {
		s.t.Errorf("the rows are %q, want %q", got, rows)
	}
}

const (
	floorRow     = "  0 1970-01-01 00:00:00.000000 0"
	upgradedRows = floorRow + ",app a 0 1970-01-01 00:00:00.000000 0,app b 0 1970-01-01 00:00:00.000000 0"
)

func TestEnsure(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		c := s.open("")
		for range 2 {
			procedure, err := s.table.Ensure(t.Context(), c, s.info, true)
			ok(t, err)
			if procedure == s.info.MariaDB {
				t.Errorf("procedure %v", procedure)
			}
			s.wantForm(floorRow)
		}
		s.exec(c, "DELETE FROM "+s.table.String())
		_, err := s.table.Ensure(t.Context(), c, s.info, false)
		ok(t, err)
		s.wantForm(floorRow)
	})
}

func TestUpgrade(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.firstForm()
		c := s.open("")
		for range 2 {
			_, err := s.table.Ensure(t.Context(), c, s.info, true)
			ok(t, err)
			s.wantForm(upgradedRows)
		}
		// What is there already is left alone.
		s.exec(c, "ALTER TABLE "+s.table.String()+" DROP COLUMN owner")
		_, err := s.table.Ensure(t.Context(), c, s.info, true)
		ok(t, err)
	})
}

func TestUpgradeTogether(t *testing.T) {
	for _, from := range []string{"nothing", "first form"} {
		t.Run(from, func(t *testing.T) {
			onServers(t, func(t *testing.T, s *scratch) {
				want := floorRow
				if from == "first form" {
					s.firstForm()
					want = upgradedRows
				}
				var all sync.WaitGroup
				start := make(chan struct{})
				for range 8 {
					c := s.open("")
					all.Go(func() {
						<-start
						if _, err := s.table.Ensure(limited(t), c, s.info, true); err != nil {
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
			onServers(t, func(t *testing.T, s *scratch) {
				root := s.open("")
				user := "u_" + s.database[len(s.database)-8:]
				s.exec(root, "CREATE USER '"+user+"'@'%'")
				s.exec(root, "GRANT SELECT, INSERT, UPDATE ON "+s.database+".* TO '"+user+"'@'%'")
				want := floorRow
				if from == "first form" {
					s.firstForm()
					want = upgradedRows
				}
				c := s.openAs(user, "")
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
					s.exec(root, text)
				}
				_, err := s.table.Ensure(t.Context(), c, s.info, false)
				ok(t, err)
				s.wantForm(want)
			})
		})
	}
}

func TestNoInnoDB(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		c := s.open("")
		s.exec(c, strings.ReplaceAll(s.table.DDL(), "InnoDB", "MyISAM"))
		_, err := s.table.Ensure(t.Context(), c, s.info, true)
		if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "MyISAM") {
			t.Error(err)
		}
		s.exec(c, "DROP TABLE "+s.table.String())
		s.exec(c, "CREATE VIEW "+s.table.String()+" AS SELECT 1 AS name")
		_, err = s.table.Ensure(t.Context(), c, s.info, true)
		if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "view") {
			t.Error(err)
		}
	})
}

// TestProcedure: it tells of a live lease, and leaves no transaction open then. What
// is quiet it answers without a result set.
func TestProcedure(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		if s.info.MariaDB {
			t.Skip("there the same is an anonymous block")
		}
		c, other := s.open(""), s.open("")
		s.exec(c, "CREATE PROCEDURE "+s.table.Procedure()+"() COMMENT 'mysqllock 1' SELECT 1")
		procedure, err := s.table.Ensure(t.Context(), c, s.info, true)
		ok(t, err)
		if !procedure {
			t.Fatal("the procedure was not made")
		}
		const anyToken = "18446744073709551615"
		call := "CALL " + s.table.Procedure() + "('app', 'k', FALSE, NULL)"
		quiet := func(most string) string { return strings.Replace(call, "NULL", most, 1) }
		lock := "SELECT 1 FROM " + s.table.String() + " WHERE namespace = 'app' AND name = 'k' FOR UPDATE NOWAIT"
		locked := func() {
			t.Helper()
			if err := server.Exec(t.Context(), other, lock); !server.Locked(err) {
				t.Errorf("the row is not locked: %v", err)
			}
			s.exec(c, "ROLLBACK")
		}
		for _, text := range []string{call, quiet("0"), quiet(anyToken)} {
			if rows := s.query(c, text); rows == nil || len(rows) != 0 {
				t.Errorf("%s without a row: %q", text, rows)
			}
			s.exec(c, "ROLLBACK")
		}
		s.exec(c, "INSERT INTO "+s.table.String()+" (namespace, name, owner, token, expires) VALUES"+
			" ('app', 'k', 'x#00000000', 18446744073709551615, UTC_TIMESTAMP(6) + INTERVAL 1 HOUR)")

		for _, text := range []string{call, quiet("0"), quiet(anyToken)} {
			row := s.query(c, text)[0]
			if row[0] != s.one(c, "SELECT CONNECTION_ID()") || len(row[1]) != 10 || row[2] != anyToken || row[3] != "x#00000000" || row[5] != "0" || row[6] != "0" {
				t.Errorf("%s of a live lease: %q", text, row)
			}
			s.exec(other, lock) // nobody has it
		}
		s.exec(other, "UPDATE "+s.table.String()+" SET versioned = 1")

		for _, end := range []string{"owner = NULL", "owner = 'x', expires = UTC_TIMESTAMP(6)"} {
			s.exec(other, "UPDATE "+s.table.String()+" SET "+end+" WHERE name = 'k'")
			for _, text := range []string{call, quiet("0"), quiet(anyToken)} {
				if row := s.query(c, text)[0]; row[1] != "0" || row[2] != anyToken || row[4] != "1" {
					t.Errorf("%s of a lease that has ended: %q", text, row)
				}
				locked()
			}
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
			{"versioned = 0, owner = 'x'", anyToken, false},
		} {
			s.exec(other, "UPDATE "+s.table.String()+" SET "+test.is+" WHERE name = 'k'")
			if rows := s.query(c, quiet(test.most)); (rows == nil) != test.quiet || len(rows) == 1 == test.quiet {
				t.Errorf("%s, with %s known: %q", test.is, test.most, rows)
			}
			locked()
		}

		shared := strings.Replace(call, "FALSE", "TRUE", 1)
		s.query(c, shared)
		s.exec(other, strings.Replace(lock, "UPDATE", "SHARE", 1))
		if err := server.Exec(t.Context(), other, lock); !server.Locked(err) {
			t.Errorf("the row is not locked for others' writes: %v", err)
		}
	})
}

func TestLive(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		c := s.open("")
		s.setup(c)
		s.exec(c, "SET time_zone = '+05:30'")
		for _, test := range []struct{ owner, expires, want string }{
			{"'x'", "UTC_TIMESTAMP(6) + INTERVAL 90 SECOND", "1 89"},
			{"NULL", "UTC_TIMESTAMP(6) + INTERVAL 90 SECOND", "0 0"},
			{"'x'", "UTC_TIMESTAMP(6)", "0 0"},
			{"NULL", "UTC_TIMESTAMP(6)", "0 0"},
		} {
			s.exec(c, "REPLACE INTO "+s.table.String()+" (namespace, name, owner, expires) VALUES ('app', 'k', "+test.owner+", "+test.expires+")")
			got := s.one(c, "SELECT CONCAT("+schema.Live("l.")+", ' ', FLOOR("+schema.Remaining("l.")+" / 1000000)) FROM "+s.table.String()+" l WHERE name = 'k'")
			if got != test.want {
				t.Errorf("owner %s, expires %s: %s, want %s", test.owner, test.expires, got, test.want)
			}
		}
	})
}
