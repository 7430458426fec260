package mysqllock

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/lockctx"
)

func TestSmoke(t *testing.T) {
	for _, port := range []int{4401, 4402} {
		t.Run(fmt.Sprint(port), func(t *testing.T) {
			plain, _ := sql.Open("mysql", fmt.Sprintf("root@tcp(127.0.0.1:%d)/", port))
			defer plain.Close()
			for _, q := range []string{"DROP DATABASE IF EXISTS smoke", "CREATE DATABASE smoke", "CREATE TABLE smoke.p (id INT PRIMARY KEY, stock INT)", "INSERT INTO smoke.p VALUES (1, 400)"} {
				if _, err := plain.Exec(q); err != nil {
					t.Fatal(q, err)
				}
			}
			db, err := sql.Open("mysqllock", fmt.Sprintf("root@tcp(127.0.0.1:%d)/smoke", port))
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			start := time.Now()
			var wg sync.WaitGroup
			for w := range 8 {
				wg.Go(func() {
					for i := range 50 {
						err := func() error {
							ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
							defer cancel()
							ctx = lockctx.With(ctx, "p:1")
							if i%2 == 0 {
								var n int
								if err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = ?", 1).Scan(&n); err != nil {
									return fmt.Errorf("query: %w", err)
								}
								_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", n-1, 1)
								return err
							}
							if w%2 == 0 {
								tx, err := db.BeginTx(ctx, nil)
								if err != nil {
									return err
								}
								defer tx.Rollback()
								var n int
								if err := tx.QueryRow("SELECT stock FROM p WHERE id = ?", 1).Scan(&n); err != nil {
									return err
								}
								if _, err := tx.Exec("UPDATE p SET stock = ? WHERE id = ?", n-1, 1); err != nil {
									return err
								}
								return tx.Commit()
							}
							return Do(context.Background(), db, "p:1", func(ctx context.Context) error {
								var n int
								if err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = ?", 1).Scan(&n); err != nil {
									return err
								}
								_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", n-1, 1)
								return err
							})
						}()
						if err != nil {
							t.Error(w, i, err)
							return
						}
					}
				})
			}
			wg.Wait()
			var n int
			db.QueryRow("SELECT stock FROM p").Scan(&n)
			s, _ := Stats(db)
			t.Log(time.Since(start), n, s)
			if n != 0 {
				t.Error("lost", n)
			}
		})
	}
}
