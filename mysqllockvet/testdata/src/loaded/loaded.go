// Package loaded loads objects before a lock, and saves them under it.
package loaded

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/uptrace/bun"
	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

type Account struct{ ID, Balance int }

func (a *Account) add(n int) { a.Balance += n }

func (a *Account) reload(ctx context.Context) error { return nil }

type Order struct{ ID int }

type Versioned struct{ ID, Balance, LockVersion int }

type Repo struct {
	pool *sql.DB
	db   *gorm.DB
	bun  *bun.DB
}

func (r *Repo) get(ctx context.Context, id int) (*Account, error) { return nil, nil }

func (r *Repo) fill(a *Account) error { return nil }

func (r *Repo) before(ctx context.Context, id int) error {
	var a Account
	if err := r.db.WithContext(ctx).First(&a, id).Error; err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		a.Balance++
		return r.db.WithContext(ctx).Save(&a).Error // want `Save writes what First on line 39 has read before the lock of line 42, over what others .*#loaded-before`
	})
}

func (r *Repo) pointer(ctx context.Context, id int) error {
	a := &Account{}
	if err := r.db.WithContext(ctx).First(a, id).Error; err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		var o Order
		if err := r.db.WithContext(ctx).First(&o).Error; err != nil {
			return err
		}
		a.add(1)
		return r.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			return tx.Save(a).Error // want `Save writes what First on line 50 has read`
		})
	}, lockctx.Lease(time.Minute))
}

func (r *Repo) with(ctx context.Context, id int) error {
	var a Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	ctx = lockctx.With(ctx, "account")
	a.Balance++
	return r.db.WithContext(ctx).Save(&a).Error // want `Save writes what First on line 67 has read before the lock of line 70`
}

func (r *Repo) acquire(ctx context.Context, id int) error {
	var a Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	hold, err := mysqllock.Acquire(ctx, r.pool, "account")
	if err != nil {
		return err
	}
	defer hold.Rollback()
	a.Balance++
	if err := r.db.WithContext(hold.Context()).Save(&a).Error; err != nil { // want `Save writes what First on line 77 has read`
		return err
	}
	return hold.Release()
}

func (r *Repo) list(ctx context.Context) error {
	var all []Account
	if err := r.db.Find(&all).Error; err != nil {
		return err
	}
	for _, a := range all {
		err := mysqllock.Do(ctx, r.pool, fmt.Sprint("account", a.ID), func(ctx context.Context) error {
			a.Balance++
			return r.db.WithContext(ctx).Save(&a).Error // want `Save writes what Find on line 94 has read`
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Repo) pointers(ctx context.Context) error {
	var all []*Account
	if err := r.db.Find(&all).Error; err != nil {
		return err
	}
	for _, a := range all {
		err := mysqllock.Do(ctx, r.pool, fmt.Sprint("account", a.ID), func(ctx context.Context) error {
			a.Balance++
			return r.db.WithContext(ctx).Save(a).Error // want `Save writes what Find on line 111 has read`
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Repo) withBun(ctx context.Context) error {
	var a Account
	if err := r.bun.NewSelect().Model(&a).WherePK().Scan(ctx); err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		if _, err := r.bun.NewUpdate().Model(&a).WherePK().Set("balance = balance + 1").Exec(ctx); err != nil {
			return err
		}
		a.Balance++
		_, err := r.bun.NewUpdate().Model(&a).WherePK().Exec(ctx) // want `Exec writes what Scan on line 128 has read`
		return err
	})
}

// The rest is right, or cannot be known.

func (r *Repo) again(ctx context.Context, id int) error {
	var a, fresh Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		db := r.db.WithContext(ctx)
		if a.ID == 1 {
			if err := db.First(&a, id).Error; err != nil {
				return err
			}
			return db.Save(&a).Error
		}
		if err := db.First(&fresh, id).Error; err != nil {
			return err
		}
		a.Balance = fresh.Balance + 1
		return db.Save(&a).Error
	})
}

func (r *Repo) helpers(ctx context.Context, id int) error {
	var a, c Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	if err := r.db.First(&c, id).Error; err != nil {
		return err
	}
	err := mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		if err := a.reload(ctx); err != nil {
			return err
		}
		return r.db.WithContext(ctx).Save(&a).Error
	})
	if err != nil {
		return err
	}
	err = mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		if err := r.fill(&c); err != nil {
			return err
		}
		return r.db.WithContext(ctx).Save(&c).Error
	})
	if err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		fresh, err := r.get(ctx, id)
		if err != nil {
			return err
		}
		c.Balance = fresh.Balance + 1
		return r.db.WithContext(ctx).Save(&c).Error
	})
}

func (r *Repo) assigned(ctx context.Context, id int, given Account) error {
	var a Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		a = given
		return r.db.WithContext(ctx).Save(&a).Error
	})
}

func (r *Repo) raw(ctx context.Context, id int) error {
	var a Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		if err := r.pool.QueryRowContext(ctx, "SELECT balance FROM accounts").Scan(&a.Balance); err != nil {
			return err
		}
		return r.db.WithContext(ctx).Save(&a).Error
	})
}

func (r *Repo) version(ctx context.Context, id int) error {
	var a Account
	var v Versioned
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	if err := r.db.First(&v, id).Error; err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		db := r.db.WithContext(ctx)
		if err := db.Where("balance = ?", a.Balance).Save(&a).Error; err != nil {
			return err
		}
		return db.Save(&v).Error
	})
}

func (r *Repo) ifVersion(ctx context.Context, id int, version uint64) error {
	var a Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	ctx = lockctx.With(ctx, "account", lockctx.IfVersion(version))
	return r.db.WithContext(ctx).Save(&a).Error
}

func (r *Repo) update(ctx context.Context, id int) error {
	var a Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		return r.db.WithContext(ctx).Model(&a).Update("balance", 0).Error
	})
}

func (r *Repo) given(ctx context.Context, id int, given *Account) error {
	var a Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		return r.db.WithContext(ctx).Save(given).Error
	})
}

func (r *Repo) other(ctx context.Context, id int) error {
	var a, b Account
	if err := r.db.First(&a, id).Error; err != nil {
		return err
	}
	b.ID = id
	return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
		return r.db.WithContext(ctx).Save(&b).Error
	})
}

func (r *Repo) outerLock(ctx context.Context, id int) error {
	return mysqllock.Do(ctx, r.pool, "accounts", func(ctx context.Context) error {
		var a Account
		if err := r.db.WithContext(ctx).First(&a, id).Error; err != nil {
			return err
		}
		return mysqllock.Do(ctx, r.pool, "account", func(ctx context.Context) error {
			return r.db.WithContext(ctx).Save(&a).Error
		})
	})
}
