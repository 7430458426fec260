package report

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

func TestMain(m *testing.M) { testshop.Main(m, replica) }

var days = []string{"2026-11-27", "2026-11-28", "2026-11-29", "2026-11-30"}

// replica sends the reports of all days to the file args[1], each by one call. The one that is first
// on the second day dies right before it sends, and on the third right after.
func replica(args ...string) error {
	db, err := sql.Open("mysqllock", args[0])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dies := func(day string) bool { // with the lease, and without a commit
		first, err := os.OpenFile(args[1]+"."+day, os.O_CREATE|os.O_EXCL, 0o600)
		return err == nil && first.Close() == nil
	}
	send := func(_ context.Context, day string) error {
		time.Sleep(300 * time.Millisecond) // so that the others come meanwhile
		if day == days[1] && dies(day) {
			os.Exit(0)
		}
		f, err := os.OpenFile(args[1], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(f, day)
		if day == days[2] && dies(day) {
			os.Exit(0)
		}
		return errors.Join(err, f.Close())
	}
	for _, day := range days {
		if err := Send(ctx, db, day, send); err != nil {
			return err
		}
	}
	fmt.Println("done")
	return db.Close()
}

// TestOneReplicaSendsEachReport: there are three, and a report each day. If one dies before it
// sends it, another does, and if it dies right after, it is sent again.
func TestOneReplicaSendsEachReport(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		t.Parallel()
		db, err := sql.Open("mysql", shop.DSN)
		dbtest.OK(t, err)
		defer db.Close()
		_, err = db.Exec("CREATE TABLE reports (day DATE PRIMARY KEY)")
		dbtest.OK(t, err)
		file := t.TempDir() + "/sent"
		alive := 0
		for _, printed := range testshop.Processes(t, 3, shop.LockDSN(), file) {
			alive += strings.Count(printed, "done")
		}
		if alive != 1 {
			t.Errorf("%d replicas live, want 1", alive)
		}
		sent, err := os.ReadFile(file)
		dbtest.OK(t, err)
		want := []string{days[0], days[1], days[2], days[2], days[3]}
		if got := strings.Fields(string(sent)); !slices.Equal(got, want) {
			t.Errorf("the reports of %v were sent, want %v", got, want)
		}
	})
}
