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

func TestTheTableIsMadeOnceWithItsHighWaterMark(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		for range 2 {
			dbtest.OK(t, s.table.Ensure(t.Context(), c, s.info, true))
			s.wantForm(highWaterRow)
		}
		s.Exec(c, "DELETE FROM "+s.table.String())
		dbtest.OK(t, s.table.Ensure(t.Context(), c, s.info, false))
		s.wantForm(highWaterRow)
	})
}

func TestATableOfTheFirstFormIsUpgraded(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.firstForm()
		c := s.open()
		for range 2 {
			dbtest.OK(t, s.table.Ensure(t.Context(), c, s.info, true))
			s.wantForm(upgradedRows)
		}
		// What is there already is left alone.
		s.Exec(c, "ALTER TABLE "+s.table.String()+" DROP COLUMN owner")
		dbtest.OK(t, s.table.Ensure(t.Context(), c, s.info, true))
	})
}

func TestManyMakeOrUpgradeTheTableTogether(t *testing.T) {
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
						if err := s.table.Ensure(dbtest.Limited(t), c, s.info, true); err != nil {
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

// TestWhatErrorsSayMakesTheTableByHand, with the rights that they ask for.
func TestWhatErrorsSayMakesTheTableByHand(t *testing.T) {
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
					err := s.table.Ensure(t.Context(), c, s.info, auto)
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
				dbtest.OK(t, s.table.Ensure(t.Context(), c, s.info, false))
				s.wantForm(want)
			})
		})
	}
}

func TestALockTableOutsideInnoDBIsUnsafe(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.Exec(c, strings.ReplaceAll(s.table.DDL(), "InnoDB", "MyISAM"))
		err := s.table.Ensure(t.Context(), c, s.info, true)
		if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "MyISAM") {
			t.Error(err)
		}
		s.Exec(c, "DROP TABLE "+s.table.String())
		s.Exec(c, "CREATE VIEW "+s.table.String()+" AS SELECT 1 AS name")
		err = s.table.Ensure(t.Context(), c, s.info, true)
		if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "view") {
			t.Error(err)
		}
	})
}

func TestALeaseWithAnOwnerIsLiveUntilItExpires(t *testing.T) {
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

// TestTheTableIsMadeAfterAWaitForItsName: many make the table at once, and a server that is slow with it has the
// others wait for longer than they may. They try again.
func TestTheTableIsMadeAfterAWaitForItsName(t *testing.T) {
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
		err := s.table.Ensure(t.Context(), c, s.info, true)
		if err := <-made; err == nil {
			t.Error("somebody else has made it")
		}
		dbtest.OK(t, err)
		s.wantForm(highWaterRow)
	})
}
